"""read and read_metadata: what a checkpoint holds, without a target."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from hyper_ckpt.api.collector import paused_collector
from hyper_ckpt.api.common import (
    CheckpointId,
    all_tensors,
    brief,
    few,
    operation,
    resolve_id,
    resolve_platform,
    state_of,
    tensor_maker,
)
from hyper_ckpt.api.load_warnings import ranks_text
from hyper_ckpt.api.loading import MAX_ATTEMPTS, LoadCall, Loading
from hyper_ckpt.api.matching import SAY_WHOSE, Match
from hyper_ckpt.api.reporting import Reporter
from hyper_ckpt.api.views import metadata_of
from hyper_ckpt.contracts.placement import StorageReader
from hyper_ckpt.contracts.platform import Platform, TensorDescription
from hyper_ckpt.engine.stored import Stored
from hyper_ckpt.engine.workers import default_threads
from hyper_ckpt.errors import ConflictError, MissingFileError, MissingKeyError
from hyper_ckpt.layout import Replicated
from hyper_ckpt.manifest import Manifest
from hyper_ckpt.metadata import Metadata
from hyper_ckpt.options import DEFAULT_TIMEOUT, LoadOptions, Verify
from hyper_ckpt.planning.standard import StandardLoadPlanner
from hyper_ckpt.registry import registry
from hyper_ckpt.state import Node, Selection, rebuild, select, skeleton
from hyper_ckpt.state.names import expand
from hyper_ckpt.state.walk import all_names, drop, prune, tensor_names
from hyper_ckpt.storage.filesystem import FileSystemReader, is_whole, not_whole


def read_metadata(
    checkpoint_id: CheckpointId | None = None, *, storage_reader: StorageReader | None = None
) -> Metadata:
    """What a checkpoint holds: reads the manifest, no data.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        ManifestError, VersionError: the manifest is damaged, or newer than this release.
    """
    where = resolve_id(checkpoint_id, storage_reader.checkpoint_id if storage_reader else None, "storage_reader")
    return metadata_of((storage_reader or FileSystemReader()).at(where).load_metadata(registry().store(where)))


def read(
    checkpoint_id: CheckpointId | None = None,
    *,
    storage_reader: StorageReader | None = None,
    keys: Sequence[str] | None = None,
    platform: Platform | str | None = None,
    verify: Verify = "during",
    partial: bool = False,
    options: LoadOptions | None = None,
) -> dict[Any, Any]:
    """Builds the saved state anew, in this process alone. Tensors come whole.

    Where ranks saved different plain values, and for `PerRank`, it is rank 0's state (the lowest rank's that has any).
    Where they saved different tensors under one name, `LoadOptions(conflicts=...)` must say whose to read.

    Args:
        checkpoint_id: path or URL.
        storage_reader: finds chunks; with `checkpoint_id`, `storage_reader.at(checkpoint_id)` is used.
        keys: only these names, and what lies below them; `*`, `?` and `[...]` stand for any characters, also `/`, as in
            "model/layers.0.*".
        platform: whose tensors to make; None makes numpy arrays (ml_dtypes where numpy has no such dtype).
        verify: as for `load`.
        partial: of a save with `use_collectives=False` of which ranks' parts are missing, read what the others' cover;
            tensors of which a part is missing are left out, with a warning (None stands for them in lists and tuples).
        options: as for `load`; those that speak of a target mean nothing here.

    Raises:
        MissingKeyError: a name in `keys` was not saved.
        ConflictError: ranks saved different tensors under a name, and `options` does not say whose to read.
        CheckpointNotFoundError, CorruptCheckpointError: as for `load`.
    """
    chosen = resolve_platform(platform or "numpy", None, no_dist=True)
    where = resolve_id(checkpoint_id, storage_reader.checkpoint_id if storage_reader else None, "storage_reader")
    store, reader = registry().store(where), (storage_reader or FileSystemReader()).at(where)
    call = LoadCall(
        chosen,
        store,
        reader,
        StandardLoadPlanner(),
        dataclasses.replace(options or LoadOptions(), partial=partial or (options is not None and options.partial)),
        False,
        verify,
        False,
        default_threads(),
        None,
    )
    wanted = [keys] if isinstance(keys, str) else keys
    reporter = Reporter("load", store.url, chosen, not call.options.progress, registry().observers()).start()
    with reporter.failing(), paused_collector():
        for attempts_left in reversed(range(MAX_ATTEMPTS)):
            manifest = call.load_metadata()
            try:
                return _build(call, manifest, wanted, reporter)
            except MissingFileError:
                # As for a load: it may have been replaced meanwhile.
                if not attempts_left or call.load_metadata().save_id == manifest.save_id:
                    raise
    raise AssertionError("unreachable")


def _build(call: LoadCall, manifest: Manifest, keys: Sequence[str] | None, reporter: Reporter) -> dict[Any, Any]:
    chosen, tensors = call.platform, all_tensors(call.platform)
    selected = select(state_of(manifest), 0, whose=call.options.conflicts, saved_by_these=manifest.world_size == 1)
    tree = selected.tree
    if keys is not None:
        tree, absent = prune(tree, expand(keys, all_names(tree)))
        if absent:
            where = manifest.checkpoint
            names = ", ".join(map(repr, absent))
            raise MissingKeyError(f"{where} has no {names}: see `hyper-ckpt show {where}`", absent)
    if manifest.absent:
        tree = _without_holes(tree, manifest)
    saved = tensor_names(tree)
    _refuse_undecided(saved, selected, manifest)
    manifest = manifest.renamed(selected.stored)
    rows, (file, _) = manifest.rows(saved), manifest.pieces(saved)
    others = [manifest.tensor(saved[i]) for i in np.flatnonzero(file < 0).tolist()]
    for stored in others:
        if not is_whole(stored):  # known before memory is taken for it
            raise not_whole(manifest, stored.name)
    parts = {id(stored.copies[0].file): stored.copies[0].file for stored in others}  # many may be of one grid
    loading = Loading(call, operation(chosen, DEFAULT_TIMEOUT, "read"), reporter)
    files = Stored(call.store, manifest, call.verify != "off")
    # What the manifest says is not believed before the files are there: no memory is taken for less.
    files.check_files(np.unique(np.concatenate([file[file >= 0], *parts.values()])).tolist())
    targets = {
        name: tensors.empty(TensorDescription(row.dtype, row.shape, Replicated()))
        for name, row in zip(saved, rows, strict=True)
    }
    loading.plan(skeleton(tree), manifest, Match(tree, wanted=dict(targets)), files).run()
    state = rebuild(
        tree,
        tensor=targets.__getitem__,
        payload=lambda name: next(
            (p for rank in range(files.world_size) if (p := files.payload(rank, name)) is not None), None
        ),
        blob=lambda name, node: loading.blob(files, name, node),
        make_tensor=tensor_maker(tensors, chosen.stager),
        codecs=registry().codecs(),
        allow_pickle=call.options.allow_pickle,
    )
    reporter.finished("loaded", sum(f.size for f in manifest.files))
    return state


def _without_holes(tree: Node, manifest: Manifest) -> Node:
    """The state without the tensors of which parts are missing."""
    holes = [name for name in tensor_names(tree) if not is_whole(manifest.tensor(name))]
    warnings.warn(
        f"{manifest.checkpoint} lacks the parts of {ranks_text(manifest)}: left out are "
        f"{few([*map(repr, holes)]) or 'none of the tensors that are known'}",
        stacklevel=4,
    )
    return drop(tree, set(holes))


def _refuse_undecided(names: Sequence[str], selected: Selection, manifest: Manifest) -> None:
    """Raises where ranks saved different tensors, and it was not said whose to read."""
    unclear = [name for name in names if name in selected.undecided]
    if unclear:
        ranks = brief(selected.undecided[unclear[0]])
        raise ConflictError(
            f"{manifest.checkpoint}: ranks saved different tensors under {few([*map(repr, unclear)])} ({unclear[0]!r}: "
            f"ranks {ranks}). {SAY_WHOSE}",
            unclear,
        )
