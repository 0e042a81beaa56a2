"""No more files may be opened, at any stage of a first save or load: a documented error, and later all works."""

import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from hyper_ckpt import save

SCRIPT = """
    import errno, os, resource, sys
    import numpy, numpy.linalg  # numpy itself cannot be imported again once that failed

    act, path, kind, *numbers = sys.argv[1:]

    if act != "read":  # which imports it when it first meets what numpy lacks
        import ml_dtypes

    def state(value):
        import ml_dtypes
        return {"x": numpy.full(300, value), "b": numpy.full(3, value, ml_dtypes.bfloat16)}

    class Refusal:  # from the n-th file on that Python opens
        def __init__(self, number):
            self.left, self.on = number, True
            sys.addaudithook(self)

        def __call__(self, event, args):
            if self.on and event in ("open", "os.listdir", "os.scandir"):
                self.left -= 1
                if self.left < 0:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        def lift(self):
            self.on = False

    class Limit:  # of the system
        def __init__(self, number):
            self.before = resource.getrlimit(resource.RLIMIT_NOFILE)
            fd = os.open(os.devnull, os.O_RDONLY)
            os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (fd + number, self.before[1]))

        def lift(self):
            resource.setrlimit(resource.RLIMIT_NOFILE, self.before)

    def save(where, value):
        import hyper_ckpt
        hyper_ckpt.save(state(value), where, no_dist=True)

    def load(where):
        import hyper_ckpt
        into = state(0)
        hyper_ckpt.load(into, where, no_dist=True)
        assert into["x"][0] == 1 and into["b"][0] == 1

    def background(where, value):
        import hyper_ckpt
        hyper_ckpt.async_save(state(value), where, no_dist=True).result()

    def read(where):
        import hyper_ckpt
        assert hyper_ckpt.read(where)["b"][0] == 1

    def child(kind, number):
        import hyper_ckpt
        if kind == "warm":
            save(f"{path}/warm-{number}", 1)
        name = f"{path}/{act}-{kind}-{number}"
        refused = (Refusal if kind == "refusal" else Limit)(number)
        outcome = "done"
        try:
            {"save": lambda: save(name, 1), "async": lambda: background(name, 1), "load": lambda: load(f"{path}/there"),
             "read": lambda: read(f"{path}/there")}[act]()
        except hyper_ckpt.errors.CheckpointError as error:
            outcome = "refused"
            assert os.strerror(errno.EMFILE) in str(error), error
        except BaseException as error:
            refused.lift()
            import traceback
            traceback.print_exc()
            return "undocumented"
        refused.lift()
        save(f"{name}-after", 1)
        load(f"{name}-after")
        return outcome

    def run(kind, number):
        out, into = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.write(into, child(kind, number).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        os.close(into)
        with open(out, "rb") as answer:
            return answer.read().decode()

    got = [run(kind, int(number)) for number in numbers]
    print(got)
    assert set(got) <= {"done", "refused"}
    assert "refused" in got
"""


def ran(tmp_path: Path, act: str, kind: str, numbers: Iterable[int]) -> None:
    save({"x": np.full(300, 1), "b": np.full(3, 1, ml_dtypes.bfloat16)}, tmp_path / "there", no_dist=True)
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), act, str(tmp_path), kind, *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr


NUMBERS = {"refusal": (0, 40, 150, 260, 330), "limit": (0, 3, 8), "warm": range(5)}


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("act", ["save", "async", "load", "read"])
def test_no_file_can_be_opened(tmp_path: Path, act: str, kind: str) -> None:
    ran(tmp_path, act, kind, NUMBERS[kind])


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("act", ["save", "async", "load", "read"])
def test_no_file_can_be_opened_from_any_one_on(tmp_path: Path, act: str) -> None:
    ran(tmp_path, act, "refusal", range(0, 400, 3))
