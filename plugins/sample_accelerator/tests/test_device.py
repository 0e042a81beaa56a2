"""The simulated device: everything late, freed memory overwritten, and no later or sooner than the rules allow."""

import threading

import numpy as np
import pytest

from hyper_ckpt_sample import device
from hyper_ckpt_sample.device import POISON, Device, DeviceError, Span, Stream, allocate, current_stream, on

OLD, NEW = b"\x07", b"\x08"


@pytest.fixture
def chip() -> Device:
    return Device(0)


def block(chip: Device, nbytes: int = 4) -> Span:
    return Span(allocate(nbytes, chip), 1, 0, (nbytes,), (1,))


def filled(chip: Device, element: bytes = OLD) -> Span:
    out = block(chip)
    device.fill(out, element)
    current_stream(chip).synchronize()
    return out


def look(span: Span) -> bytes:
    host = device.pinned(span.nbytes)
    device.copy_to_host(span, host)
    current_stream(span.memory.device).synchronize()
    return host.tobytes()


def test_a_copy_to_the_host_is_late(chip):
    host = np.zeros(4, np.uint8)
    device.copy_to_host(filled(chip), host)
    assert host.tolist() == [0] * 4
    current_stream(chip).synchronize()
    assert host.tolist() == [7] * 4


def test_host_memory_is_read_when_the_copy_runs(chip):
    span, host = block(chip), np.full(4, 1, np.uint8)
    device.copy_from_host(host, span)
    host[:] = 2
    assert look(span) == b"\x02" * 4


def test_a_stream_runs_in_order_up_to_the_event(chip):
    stream, ran = Stream(chip), []
    for number in range(4):
        stream.submit(lambda number=number: ran.append(number))
        if number == 1:
            event = stream.record_event()
    assert not event.query()
    event.synchronize()
    assert (ran, event.query()) == ([0, 1], True)
    stream.synchronize()
    assert ran == [0, 1, 2, 3]


def test_streams_are_ordered_only_by_waiting(chip):
    one, other, ran = Stream(chip), Stream(chip), []
    one.submit(lambda: ran.append("one"))
    other.submit(lambda: ran.append("other"))
    other.synchronize()
    assert ran == ["other"]
    other.wait_stream(one)
    one.submit(lambda: ran.append("later"))
    other.submit(lambda: ran.append("other again"))
    other.synchronize()
    assert ran == ["other", "one", "other again"]


def test_streams_may_wait_for_each_other_in_turn(chip):
    one, other, ran = Stream(chip), Stream(chip), []
    for number in range(3000):
        first, second = (one, other) if number % 2 else (other, one)
        first.wait_stream(second)
        first.submit(lambda number=number: ran.append(number))
    one.synchronize()
    assert ran == list(range(3000))


def test_each_thread_has_a_stream_of_its_own(chip):
    found = []
    thread = threading.Thread(target=lambda: found.append(current_stream(chip)))
    thread.start()
    thread.join(10)
    assert found[0] is not current_stream(chip)
    side = Stream(chip)
    with on(side):
        assert current_stream(chip) is side
    assert current_stream(chip) is not side


def test_the_whole_device_is_waited_for(chip):
    ran = []
    for number in range(3):
        Stream(chip).submit(lambda number=number: ran.append(number))  # nobody keeps the stream
    device.synchronize(chip)
    assert ran == [2, 1, 0], "the order is not that in which the host gave out the work"


def test_fresh_memory_is_poisoned(chip):
    assert look(block(chip)) == bytes([POISON]) * 4


def test_freed_memory_is_given_out_again_at_once(chip):
    span = filled(chip)
    cells = span.memory.cells
    del span
    again = block(chip)
    assert again.memory.cells is cells
    assert look(again) == bytes([POISON]) * 4
    assert block(chip).memory.cells is not cells


def test_other_streams_get_other_memory(chip):
    span = filled(chip)
    cells = span.memory.cells
    del span
    with on(Stream(chip)):
        assert block(chip).memory.cells is not cells


def copied_while_freed(chip: Device, keep: bool) -> bytes:
    """What a copy on another stream sees of memory whose last reference goes before it runs."""
    span, side, host = filled(chip), Stream(chip), np.zeros(4, np.uint8)
    side.wait_stream(current_stream(chip))
    with on(side):
        device.copy_to_host(span, host)
    if keep:
        span.memory.keep_for(side)
    del span
    device.fill(block(chip), NEW)
    current_stream(chip).synchronize()
    side.synchronize()
    return host.tobytes()


def test_memory_freed_too_early_is_overwritten(chip):
    assert copied_while_freed(chip, keep=False) != OLD * 4


def test_memory_is_kept_for_a_stream(chip):
    assert copied_while_freed(chip, keep=True) == OLD * 4


def test_memory_that_was_kept_comes_back(chip):
    span, side = filled(chip), Stream(chip)
    cells = span.memory.cells
    span.memory.keep_for(side)
    side.submit(lambda: None)
    del span
    assert block(chip).memory.cells is not cells
    side.synchronize()
    assert block(chip).memory.cells is cells


def test_memory_freed_on_its_own_stream_is_safe(chip):
    """As with a framework's temporaries: work that is queued already still finds its bytes."""
    span, target = filled(chip), block(chip)
    device.copy(span, target)
    del span
    device.fill(block(chip), NEW)
    assert look(target) == OLD * 4


def test_copies_on_the_device_follow_strides(chip):
    memory, other = allocate(24, chip), allocate(24, chip)
    rows = Span(memory, 4, 0, (2, 3), (12, 4))
    columns = Span(memory, 4, 0, (3, 2), (4, 12))
    every_second = Span(other, 4, 0, (3, 1), (8, 4))
    device.copy_from_host(np.arange(6, dtype="<i4").view(np.uint8), rows)
    assert np.frombuffer(look(columns), "<i4").tolist() == [0, 3, 1, 4, 2, 5]
    device.copy(Span(memory, 4, 4, (3, 1), (4, 4)), every_second)
    assert np.frombuffer(look(every_second), "<i4").tolist() == [1, 2, 3]
    device.copy_from_host(np.zeros(0, np.uint8), Span(memory, 4, 0, (0, 2), (8, 4)))
    device.synchronize(chip)


def test_a_failure_is_for_whoever_waits(chip):
    stream, later, ran = Stream(chip), Stream(chip), []
    stream.submit(lambda: 1 / 0)
    later.wait_stream(stream)
    later.submit(lambda: ran.append(1))
    with pytest.raises(DeviceError):
        later.synchronize()
    with pytest.raises(DeviceError) as caught:
        stream.synchronize()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not ran


def test_many_threads(chip):
    def work(number: int) -> None:
        for turn in range(200):
            span = block(chip)
            device.fill(span, bytes([(number + turn) % 200]))
            if look(span) != bytes([(number + turn) % 200]) * 4:
                wrong.append((number, turn))

    wrong: list[tuple[int, int]] = []
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
