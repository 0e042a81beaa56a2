"""What other ranks say is taken for what it is: junk is a documented error, and no text moves a terminal's cursor."""

import pickle
from pathlib import Path

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt import errors
from hyper_ckpt.agreement.verdict import Verdict, rebuild, unpack
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.errors import CheckpointError, RankFailedError, StateMismatchError
from hyper_ckpt.manager.schedule import SaveInterval, Schedule
from hyper_ckpt.testing.world import run_world

from ._ranks import all_fail, caught

FORGED = "a\x1b[2J\x1b]0;title\x07b\rc\x9bd\u202ee\nf"
SHOWN = "a\\x1b[2J\\x1b]0;title\\x07b\\rc\\x9bd\\u202ee\nf"


@pytest.mark.parametrize("name", sorted(vars(errors)))
def test_no_error_shows_control_characters(name: str) -> None:
    kind = getattr(errors, name)
    if not (isinstance(kind, type) and issubclass(kind, CheckpointError)):
        pytest.skip("not an error")
    error = kind(FORGED)
    assert str(error) == SHOWN
    assert str(pickle.loads(pickle.dumps(error))) == SHOWN


@pytest.mark.parametrize(
    "kind", ["StoreError", "RankTimeoutError", "ValueError", "TypeError", "SystemExit", "no class"]
)
def test_the_words_of_another_rank_are_escaped(kind: str) -> None:
    error = rebuild(Verdict(error=kind, message=FORGED), None)
    assert str(error) == SHOWN
    assert isinstance(error, CheckpointError | ValueError | TypeError)


def test_an_error_of_one_rank_is_escaped_on_all(tmp_path: Path) -> None:
    def refused(platform: Platform) -> None:
        state = {"w": np.ones(2)} | ({FORGED: object()} if platform.ranks.rank == 1 else {})
        hyper_ckpt.save(state, tmp_path / "c", platform=platform, timeout=20)

    text = str(all_fail(3, refused, tmp_path / "scratch"))
    assert "title" in text
    assert not any(c in text for c in "\x1b\x07\r\x9b\u202e")


@pytest.mark.parametrize("junk", [b"", b"\xc1", b"cos\nsystem\n(S'true'\ntR.", b"\x94\x01\x02\x03\x04", b"\xa1\xff"])
def test_junk_in_place_of_a_message_is_a_documented_error(junk: bytes) -> None:
    with pytest.raises(RankFailedError, match="rank 2 sent no valid message") as failed:
        unpack(junk, Verdict, 2)
    assert failed.value.ranks == (2,)


def test_a_junk_vote_is_everybodys_documented_error() -> None:
    """Whatever stands in the store: a save ends, and with an error of this library."""

    def forged(platform: Platform) -> BaseException:
        ranks = platform.ranks
        if ranks.rank == 1:
            ranks.key_value_store.set("hyper-ckpt/0/0/1", b"\xc1junk")
            ranks.key_value_store.set("hyper-ckpt/at/1", b"\xc1junk")
            return RankFailedError("")
        ranks.key_value_store.get("hyper-ckpt/at/1", 20.0)
        return caught(lambda: hyper_ckpt.save({"w": np.ones(2)}, "memory://forged", platform=platform, timeout=2))

    assert all(isinstance(error, RankFailedError) for error in run_world(2, forged))


def test_a_junk_answer_to_should_save_is_a_documented_error() -> None:
    def forged(platform: Platform) -> None:
        if platform.ranks.rank == 0:
            platform.ranks.key_value_store.set("key/call", b"\xc1junk")
            return
        platform.ranks.key_value_store.get("key/call", 20.0)
        with pytest.raises(RankFailedError, match="no valid message"):
            Schedule(platform.ranks, SaveInterval(minutes=1), True, "key").due(1)

    run_world(2, forged)


def test_problems_that_are_listed_stay_as_they_are() -> None:
    assert StateMismatchError("x", [FORGED]).problems == (FORGED,)
