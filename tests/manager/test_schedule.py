"""should_save: the same answer on every rank, whoever is ahead, as long as none is too far."""

import random
from collections.abc import Collection
from typing import Any

import pytest

from hyper_ckpt import SaveInterval
from hyper_ckpt.builtin.numpy_platform import SingleRank
from hyper_ckpt.contracts.platform import KeyValueStore
from hyper_ckpt.errors import RanksDisagreeError
from hyper_ckpt.key_value import InProcessKeyValueStore
from hyper_ckpt.manager import schedule
from hyper_ckpt.manager.schedule import Schedule

WORLD = 3


class Counting(InProcessKeyValueStore):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get_many(self, keys: Collection[str], timeout: float = 0.0) -> dict[str, bytes]:
        self.calls += 1
        return super().get_many(keys, timeout)


class Rank(SingleRank):
    """A rank that has a key-value store and nothing else."""

    def __init__(self, rank: int, store: KeyValueStore, world_size: int = WORLD) -> None:
        self._rank, self._key_value_store, self._size = rank, store, world_size  # type: ignore[assignment]

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._size


def world(interval: SaveInterval, listens: bool = True, store: KeyValueStore | None = None) -> list[Schedule]:
    box = store or InProcessKeyValueStore()
    return [Schedule(Rank(r, box), interval, listens, "k") for r in range(WORLD)]


class Clock:
    """Moves when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(schedule.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_steps_need_no_message() -> None:
    store = Counting()
    for each in world(SaveInterval(steps=10), False, store):
        assert [step for step in range(35) if each.due(step)] == [10, 20, 30]
        assert not each.talks
    assert store.calls == 0


def test_one_look_per_call() -> None:
    store = Counting()
    for each in world(SaveInterval(steps=10, minutes=1), True, store):
        before = store.calls
        for step in range(100):
            each.due(step)
        assert store.calls - before <= 100


def test_minutes_are_those_of_rank_zero(clock: Clock) -> None:
    ranks = world(SaveInterval(minutes=1, lead=2))
    answers = []
    for step in range(1, 13):
        clock.now += 10
        answers.append([each.due(step) for each in ranks])
    # Late at step 6, for the second call after it; the next minute begins then.
    assert [i + 1 for i, a in enumerate(answers) if a[0]] == [8]
    assert all(len(set(a)) == 1 for a in answers)


def test_minutes_leave_it_to_a_step_that_comes_anyway(clock: Clock) -> None:
    ranks = world(SaveInterval(steps=5, minutes=1, lead=2))
    found = []
    for step in range(1, 11):
        clock.now += 15
        found.append({each.due(step) for each in ranks})
        if found[-1] == {True}:
            for each in ranks:
                each.begun()
    assert [i + 1 for i, a in enumerate(found) if a == {True}] == [5, 10]


def test_alone_there_is_no_delay(clock: Clock) -> None:
    one = Schedule(SingleRank(), SaveInterval(minutes=1), True, "k")
    clock.now = 61
    assert one.due(1)
    assert not one.due(2)
    one.ask()
    assert not one.preempted
    assert one.due(3)
    assert one.preempted
    assert one.due(3), "asked twice"
    assert not one.due(4)


@pytest.mark.parametrize("asking", range(WORLD))
@pytest.mark.parametrize("stride", [1, 10])
def test_anybody_may_ask(asking: int, stride: int) -> None:
    ranks = world(SaveInterval(lead=1))
    for step in range(0, 5 * stride, stride):
        assert [each.due(step) for each in ranks] == [False] * WORLD
    ranks[asking].ask()
    answers = [[each.due(step) for each in ranks] for step in range(5 * stride, 12 * stride, stride)]
    assert sum(a == [True] * WORLD for a in answers) == 1
    assert sum(any(a) for a in answers) == 1
    assert all(each.preempted for each in ranks)


def test_a_rank_that_is_past_the_step_says_so() -> None:
    ranks = world(SaveInterval(lead=1))
    for step in (1, 2, 3):
        ranks[1].due(step)
    ranks[0].due(1)
    ranks[0].ask()
    ranks[0].due(2)
    with pytest.raises(RanksDisagreeError, match=r"rank 0 named step 3.*rank 1 is at 4.*lead"):
        ranks[1].due(4)


def test_going_back_makes_what_was_named_void() -> None:
    ranks = world(SaveInterval(lead=3))
    for each in ranks:
        each.due(100)
    ranks[0].ask()
    ranks[0].due(101)  # names 104
    for each in ranks:
        each.restart()
    answers = [[each.due(step) for each in ranks] for step in range(50, 60)]
    assert [i for i, a in enumerate(answers) if all(a)] == [4]
    assert sum(any(a) for a in answers) == 1


@pytest.mark.parametrize("lead", [1, 2, 4])
@pytest.mark.parametrize("steps", [None, 3, 7])
def test_the_same_answer_on_all(lead: int, steps: int | None, clock: Clock) -> None:
    """Ranks take turns in any order, none more calls ahead of rank 0 than `lead` allows; a save is a meeting."""
    for seed in range(200):
        chance = random.Random(seed)
        stride, clock.now = chance.choice([1, 5]), 0.0
        ranks = world(SaveInterval(steps=steps, minutes=1, lead=lead))
        answers: list[list[bool]] = [[] for _ in ranks]
        met = 0  # all ranks have saved together what was due up to this call
        for _ in range(90):
            clock.now += chance.choice([0, 1, 20])
            done = [len(a) for a in answers]
            if all(d > met and a[-1] for d, a in zip(done, answers, strict=True)):
                met = max(done)
                for each in ranks:
                    each.begun()
            waits = [d > met and a[-1] for d, a in zip(done, answers, strict=True)]
            can = [r for r in range(WORLD) if not waits[r] and (r == 0 or done[r] < done[0] + lead)]
            assert can, f"seed {seed}: some wait for a save that others do not see: {answers}"
            if chance.random() < 0.05:
                ranks[chance.randrange(WORLD)].ask()
            rank = chance.choice(can)
            answers[rank].append(ranks[rank].due((done[rank] + 1) * stride))
        shared = min(map(len, answers))
        assert all(a[:shared] == answers[0][:shared] for a in answers), f"seed {seed}: {answers}"


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"minutes": -1.0}, {"lead": 0}])
def test_intervals_that_cannot_be_meant(wrong: Any) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        SaveInterval(**wrong)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"steps": "5"}, "steps must be an integer, not '5'"),
        ({"steps": 2.5}, r"steps must be an integer, not 2\.5"),
        ({"minutes": "5m"}, "minutes must be a number, not '5m'"),
        ({"lead": None}, "lead must be an integer, not None"),
    ],
)
def test_intervals_of_another_type(wrong: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        SaveInterval(**wrong)
