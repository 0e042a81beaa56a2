"""What `async_save` returns."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from types import TracebackType

from hyper_ckpt.engine.latch import Latch
from hyper_ckpt.errors import SaveInFlightError
from hyper_ckpt.metadata import Metadata

Callback = Callable[[BaseException | None], object]


class SaveHandle:
    """A save that is finished in the background. A context: leaving it waits until the checkpoint is complete.

    Args:
        checkpoint_id: path or URL.
        timeout: of the save, in seconds.
        waited: seconds that the call waited for earlier saves.
    """

    def __init__(self, checkpoint_id: str, timeout: float, waited: float) -> None:
        self.checkpoint_id, self.timeout, self.waited = checkpoint_id, timeout, waited
        self._staged, self._over = Latch(), Latch()
        self._metadata: Metadata | None = None
        self._error: BaseException | None = None
        self._seen = False
        self._callbacks: list[deque[Callback]] = []  # each is emptied by the one thread that calls it

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "complete" if self.done() else "in flight"
        return f"<SaveHandle of {self.checkpoint_id}: {state}>"

    def wait_staged(self, timeout: float | None = None) -> None:
        """Waits until the state may be changed.

        Raises:
            SaveInFlightError: that took longer than `timeout` seconds.
            CheckpointError: the save failed before.
        """
        self._wait(self._staged, timeout, "has not copied the state")
        if self._over.is_set() and self._error is not None:
            self.result()

    def result(self, timeout: float | None = None) -> Metadata:
        """Waits until the checkpoint is complete for all ranks.

        Returns:
            What was saved, as from `save`.

        Raises:
            SaveInFlightError: that took longer than `timeout` seconds.
            CheckpointError: the save failed; nothing was published.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        assert self._metadata is not None
        return self._metadata

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits as `result` does, and returns what that would raise, or None."""
        self._wait(self._over, timeout, "is not complete")
        self._seen = True
        return self._error

    def done(self) -> bool:
        """Whether the save is over, well or not."""
        return self._over.is_set()

    def add_done_callback(self, callback: Callback) -> None:
        """Calls `callback(error)` once the save is over, `None` for one that went well: in the thread that finishes
        saves, which begins no other save before it returns; at once, in this one, if the save is over. What it raises
        is printed."""
        own = deque([callback])
        self._callbacks.append(own)
        if self._over.is_set():
            _call(own, self._error)

    def unseen_failure(self) -> BaseException | None:
        """Why it failed, if it did and nobody was told; from now on somebody was. An interrupt was raised where it
        came."""
        seen, self._seen = self._seen, True
        return None if seen or not isinstance(self._error, Exception) else self._error

    def mark_staged(self) -> None:
        """The state may be changed."""
        self._staged.set()

    def run(self, finish: Callable[[Callable[[], None]], Metadata]) -> None:
        """The background's part: raises only what interrupts the thread. `finish` calls what it is given when the state
        may change."""
        try:
            self._metadata = finish(self.mark_staged)
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            if self._metadata is None and self._error is None:
                self._error = KeyboardInterrupt()  # between the lines of this function
            self._staged.set()
            self._over.set()
            for callback in self._callbacks:
                _call(callback, self._error)

    def _wait(self, event: Latch, timeout: float | None, what: str) -> None:
        if not event.wait(timeout):
            raise SaveInFlightError(f"the save to {self.checkpoint_id} {what} after {timeout:g} s: wait again")

    def __enter__(self) -> SaveHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.result()
        else:  # that error is the one to raise; this one is told by the next save
            self._over.wait()


def _call(callback: deque[Callback], error: BaseException | None) -> None:
    try:
        only = callback.popleft()
    except IndexError:  # another thread calls it
        return
    try:
        only(error)
    except Exception:
        traceback.print_exc()
