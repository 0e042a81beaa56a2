"""verify: is a checkpoint what was saved?"""

from __future__ import annotations

from collections.abc import Callable

from hyper_ckpt.api.common import CheckpointId, resolve_id, state_of
from hyper_ckpt.api.loading import MAX_ATTEMPTS
from hyper_ckpt.api.views import user_value
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.engine.verify import Problem, Verifier, VerifyReport
from hyper_ckpt.engine.workers import default_threads
from hyper_ckpt.errors import CheckpointReplacedError, CorruptCheckpointError
from hyper_ckpt.manifest import MANIFEST_NAME
from hyper_ckpt.registry import registry
from hyper_ckpt.storage.filesystem import FileSystemReader


def verify(
    checkpoint_id: CheckpointId, *, threads: int | None = None, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Reads everything that a checkpoint stores and compares it with its digests.

    Args:
        checkpoint_id: path or URL.
        threads: threads that read; None: one per processor, 2 to 8.
        progress: told of the bytes checked so far and of all there are; from any thread.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        VersionError: it is newer than this release.
        StoreError: the store cannot be reached.
        CheckpointReplacedError: newer checkpoints kept coming while it was checked.
    """
    store = registry().store(resolve_id(checkpoint_id, None, "storage_reader"))
    for _ in range(MAX_ATTEMPTS):
        save_id, report = _check(store, threads or default_threads(), progress)
        # What a newer checkpoint replaced meanwhile is no problem.
        if report.ok or save_id is None or FileSystemReader().load_metadata(store).save_id == save_id:
            return report
    raise CheckpointReplacedError(f"{store.url} was replaced while it was checked, each time anew: check it again")


def _check(
    store: ByteStore, threads: int, progress: Callable[[int, int], None] | None
) -> tuple[str | None, VerifyReport]:
    """The save that was checked (None: its manifest is damaged), and the result."""
    try:
        manifest = FileSystemReader().load_metadata(store)
        state_of(manifest)
        user_value(manifest.user)
    except CorruptCheckpointError as error:
        return None, VerifyReport(0, (Problem(MANIFEST_NAME, "", 0, 0, str(error)),))
    return manifest.save_id, Verifier(store, manifest, threads, progress).run()
