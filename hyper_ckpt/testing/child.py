"""The process of one rank: runs functions that its parent names, one after another.

Run as `python -m hyper_ckpt.testing.child FD`, where FD is this end of a socket. It ends when the
parent closes the other end, also by dying.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Target:
    """Where a function is. By module name; or by file, for modules that can't be imported by name (tests)."""

    module: str
    function: str
    file: str | None = None

    @staticmethod
    def of(function: str | Callable[..., Any]) -> Target:
        """From "module:function", "path/to/file.py:function" or a function of a module's top level."""
        if not isinstance(function, str):
            if "<" in function.__qualname__:
                raise ValueError(f"{function.__qualname__} can't be found by name: define it at the top of its module")
            return Target(function.__module__, function.__qualname__, str(sys.modules[function.__module__].__file__))
        place, _, name = function.rpartition(":")
        if not place:
            raise ValueError(f'"module:function" or "file.py:function" is needed, not {function!r}')
        return (
            Target(Path(place).stem, name, str(Path(place).resolve())) if place.endswith(".py") else Target(place, name)
        )

    def resolve(self) -> Callable[..., Any]:
        """The function, its module imported if need be."""
        found: Any = self._module()
        for part in self.function.split("."):
            found = getattr(found, part)
        if not callable(found):
            raise TypeError(f"{self.module}:{self.function} is not a function")
        return found  # type: ignore[no-any-return]

    def _module(self) -> Any:
        if self.file is None:
            return importlib.import_module(self.module)
        known = sys.modules.get(self.module) or _importable(self.module)
        if known is not None and getattr(known, "__file__", None) == self.file:
            return known
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{self.file} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module  # so that results of its classes can be pickled
        spec.loader.exec_module(module)
        return module


def _importable(name: str) -> Any:
    """The module, if it can be imported by its name. One that fails while it runs is an error."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a parent that isn't there, or is no package
        return None
    return importlib.import_module(name) if found else None


@dataclass(frozen=True)
class Job:
    """One call for one rank: `target(rank, world_size, *args)`."""

    target: Target
    rank: int
    world_size: int
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Failure:
    """What a rank raised. `error` is the pickled exception, where that works."""

    text: str
    error: bytes | None

    def exception(self) -> BaseException | None:
        """The exception itself, or None if it can't be rebuilt here."""
        try:
            found = pickle.loads(self.error) if self.error else None
        except Exception:  # classes may be unknown here, or need other arguments
            return None
        return found if isinstance(found, BaseException) else None


def run_job(job: Job) -> tuple[str, Any]:
    """("ok", result) or ("error", Failure); either can be pickled."""
    try:
        result = job.target.resolve()(job.rank, job.world_size, *job.args)
        return "ok", pickle.dumps(result)
    except SystemExit:  # ends the process, as it would anywhere
        raise
    except BaseException as error:
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        try:
            return "error", Failure(text, pickle.dumps(error))
        except Exception:
            return "error", Failure(text, None)


def main(fd: int) -> int:
    """Serves jobs until the parent hangs up. Returns the exit code: 1 if the last job failed."""
    os.set_inheritable(fd, False)  # a child of ours would keep the parent from noticing that we died
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # a parent that lost patience asks where we are
    code = 0
    with Connection(fd) as parent:
        while True:
            try:
                job = parent.recv()
            except EOFError:
                return code
            reply = run_job(job)
            code = int(reply[0] == "error")
            sys.stdout.flush()
            parent.send(reply)


if __name__ == "__main__":
    # A module run with -m is called __main__; what travels is pickled by the real name.
    from hyper_ckpt.testing import child

    code = child.main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips the teardown of native libraries, which may wait for ranks that are gone.
    os._exit(code)
