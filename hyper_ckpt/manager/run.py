"""The checkpoints of one run: a folder per step, named so that they sort."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from hyper_ckpt.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, UnreadableFileError
from hyper_ckpt.manager.listing import STEP_FOLDER, Entry, entry_of, folders, is_link
from hyper_ckpt.manager.note import NOTE_NAME, Note, read_note, write_note
from hyper_ckpt.manager.removal import remove_below
from hyper_ckpt.manager.retention import Kept, Retention
from hyper_ckpt.manifest import MANIFEST_NAME
from hyper_ckpt.registry import registry


@dataclass(frozen=True)
class StepInfo:
    """A checkpoint of a run.

    Args:
        step: its number.
        path: path or URL.
        state: complete, incomplete (the save did not finish, or still runs), damaged, unreadable (no permission, an
            I/O error, or no regular file), or newer (than this release).
        created: seconds since the epoch.
        nbytes: of its data files.
        pinned: no retention removes it.
        metrics: what `save` was given; None where a value was no finite number.
        problem: what is wrong, if it is not complete.
    """

    step: int
    path: str
    state: str
    created: float
    nbytes: int
    pinned: bool
    metrics: dict[str, float | None]
    problem: str | None

    @property
    def complete(self) -> bool:
        """Whether it can be loaded, as far as can be told without reading its data."""
        return self.state == "complete"

    @property
    def age(self) -> float:
        """Seconds since it was saved."""
        return max(time.time() - self.created, 0.0)


class Run:
    """What lies under a root. Other things there are not looked at.

    Args:
        root: path or URL.
    """

    def __init__(self, root: str) -> None:
        self.store = registry().store(root)
        self._known: dict[str, tuple[tuple[str, str], Entry]] = {}
        self._checked = False

    @staticmethod
    def folder(step: int) -> str:
        """The folder of a step that is saved."""
        return f"step-{step:010d}"

    def path(self, step: int) -> str:
        """Where a step is saved."""
        return self.url(self.folder(step))

    def url(self, folder: str) -> str:
        """Path or URL of a folder below the root."""
        return f"{self.store.url.rstrip('/')}/{folder}"

    def folders(self) -> dict[int, tuple[str, set[str]]]:
        """Folder and names in it, by step, ascending. Of two folders for one step, that which `save` writes counts.

        Raises:
            ValueError: the root is no run but a checkpoint.
        """
        found: dict[int, tuple[str, set[str]]] = {}
        everything = folders(self.store)
        for folder, names in everything.items():
            match = STEP_FOLDER.fullmatch(folder)
            if match is None:
                continue
            step = int(match[1])
            if step not in found or folder == self.folder(step):
                found[step] = (folder, names)
        if not found:
            entry = entry_of(self.store, "", everything.get("", set()))
            if entry is not None and entry.state != "incomplete":
                above = self.store.url.rstrip("/").rpartition("/")[0]
                raise ValueError(
                    f"{self.store.url} is no run: this is a checkpoint: give the folder above it, {above}, as root"
                    + (f" ({entry.problem})" if entry.problem else "")
                )
        return dict(sorted(found.items()))

    def check(self) -> None:
        """Before the first step is saved.

        Raises:
            ValueError: the root is no run but a checkpoint.
        """
        if not self._checked and self._has_manifest():
            self.folders()
        self._checked = True

    def _has_manifest(self) -> bool:
        try:
            return self.store.stat(MANIFEST_NAME) is not None
        except UnreadableFileError:
            return True

    def refuse_link(self, folder: str) -> None:
        """Before a step is saved over what is there.

        Raises:
            CheckpointExistsError: its folder is a symbolic link.
        """
        if is_link(self.store, folder):
            raise CheckpointExistsError(
                f"{self.url(folder)} is a symbolic link, and a manager neither writes nor removes through one: remove "
                "the link, or save another step"
            )

    def steps(self) -> list[StepInfo]:
        """All steps of which anything is there, ascending."""
        return [
            StepInfo(step, self.url(e.name), e.state, e.created, e.nbytes, e.pinned, e.metrics, e.problem)
            for step, e in self._entries().items()
        ]

    def _entries(self) -> dict[int, Entry]:
        out = {}
        for step, (folder, names) in self.folders().items():
            entry = self._entry(folder, names)
            if entry is not None:
                out[step] = entry
        return out

    def _entry(self, folder: str, names: set[str]) -> Entry | None:
        """What was found whole once, and was not replaced since, is not read again."""
        stamps = (self._stamp(folder, MANIFEST_NAME, names), self._stamp(folder, NOTE_NAME, names))
        known = self._known.pop(folder, None)
        if known is not None and known[0] == stamps:
            entry: Entry | None = known[1]
        else:
            entry = entry_of(self.store, folder, names)
        if entry is not None and entry.state == "complete" and stamps[0]:
            self._known[folder] = (stamps, entry)
        return entry

    def _stamp(self, folder: str, name: str, names: set[str]) -> str:
        try:
            info = self.store.stat(f"{folder}/{name}") if name in names else None
        except CheckpointError:  # the entry says what is wrong
            return ""
        return "" if info is None else info.etag

    def existing(self, step: int) -> str:
        """The folder of a step of which something is there.

        Raises:
            CheckpointNotFoundError: nothing is.
        """
        found = self.folders().get(step)
        if found is None or entry_of(self.store, *found) is None:
            known = [str(s) for s, e in self._entries().items() if e.state == "complete"]
            raise CheckpointNotFoundError(
                f"no checkpoint of step {step} in {self.store.url}; complete: {', '.join(known[-8:]) or 'none'}"
            )
        return found[0]

    def note(self, folder: str) -> Note | None:
        """What was noted of a folder's checkpoint."""
        return read_note(self.store, f"{folder}/")

    def write_note(self, folder: str, note: Note, durable: bool) -> None:
        """Notes it."""
        write_note(self.store, f"{folder}/", note, durable)

    def remove(self, folder: str) -> None:
        """Removes what this library wrote there."""
        self._known.pop(folder, None)
        remove_below(self.store, folder)

    def superseded(self, retention: Retention, busy: Collection[int]) -> tuple[list[str], bool]:
        """Folders of complete checkpoints that no rule keeps, the lowest step first; and whether there are none since
        no checkpoint has the metric that the rules name. Folders that are links are not the run's own: they stay, and
        are not counted.

        Args:
            busy: steps that stay, whatever the rules say.
        """
        complete = {
            step: e for step, e in self._entries().items() if e.state == "complete" and not is_link(self.store, e.name)
        }
        found = [Kept(step, e.created, e.pinned, e.metrics) for step, e in complete.items()]
        now = time.time()
        kept = retention.kept(found, now) | set(busy)
        return [e.name for step, e in complete.items() if step not in kept], retention.unmeasured(found, now)
