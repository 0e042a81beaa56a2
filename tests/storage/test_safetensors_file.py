"""Data files: other readers open them, they explain themselves, and no header can do harm."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from hyper_ckpt.dtypes import TABLE, DType, dtype_of
from hyper_ckpt.errors import HeaderError, PlanError
from hyper_ckpt.receipt import BLOCK_BYTES
from hyper_ckpt.storage.safetensors_file import (
    HEADER_BASE_BYTES,
    MAX_HEADER_BYTES,
    Entry,
    build_header,
    choose_keys,
    header_digest,
    header_length,
    header_upper_bound,
    parse_header,
)

FLOAT32 = dtype_of("float32")
HOSTILE = [
    "", " ", "a/b", "../x", "nul\0", "new\nline", "😀", "x" * 3000, '"', "\\", "\\u0000", "\ud800", "a\udfffb",
    "\\ud800", "__metadata__", "hyper_ckpt", "format", "w", "w@0", "w@1", "w@01", "w@@0", "@0", "@", "w@", "w@x",
    "\ud800@0", "__metadata__@0", "é", "e\u0301", "\ufeff", "\x7f", "\u2028",
]  # fmt: skip


def entries_of(rows: Sequence[tuple[str, DType, tuple[int, ...]]]) -> list[Entry]:
    """Whole tensors, one behind the other."""
    entries, start = [], 0
    for key, (name, dtype, sizes) in zip(choose_keys([name for name, _, _ in rows]), rows, strict=True):
        entries.append(Entry(key, dtype, sizes, start, name, sizes, (0,) * len(sizes)))
        start += entries[-1].nbytes
    return entries


def file_of(entries: Sequence[Entry]) -> bytes:
    size = sum(entry.nbytes for entry in entries)
    return build_header(entries) + (bytes(range(256)) * (size // 256 + 1))[:size]


def data_of(file: bytes, entry: Entry) -> bytes:
    begin = header_length(file[:8], len(file)) + entry.start
    return file[begin : begin + entry.nbytes]


def metadata_of(file: bytes) -> dict[str, Any]:
    return json.loads(json.loads(file[8 : header_length(file[:8], len(file))])["__metadata__"]["hyper_ckpt"])


SHAPES = [(2, 3), (), (0,), (0, 5), (1,), (1, 1, 2, 1), (7,)]
ALL = entries_of([(f"{row.name}.{shape}", row, shape) for row in reversed(TABLE) for shape in SHAPES])


class TestOtherReaders:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "rank-00000.safetensors"
        path.write_bytes(file_of(ALL))
        return path

    def test_safe_open(self, path: Path) -> None:
        file = path.read_bytes()
        numpy_has = {np.dtype(row.carrier).name for row in TABLE if row.name == row.carrier.name} | {"bool"}
        with safetensors.safe_open(path, "np") as opened:
            assert sorted(opened.keys()) == sorted(entry.key for entry in ALL)
            assert opened.metadata()["format"] == "pt"
            for entry in ALL:
                assert tuple(opened.get_slice(entry.key).get_shape()) == entry.dtype.stored_shape(entry.sizes)
                assert opened.get_slice(entry.key).get_dtype() == entry.dtype.code
                if entry.dtype.name in numpy_has or entry.dtype.stored_as_bytes:
                    assert opened.get_tensor(entry.key).tobytes() == data_of(file, entry)

    def test_numpy(self, tmp_path: Path) -> None:
        entries = entries_of([(e.name, e.dtype, e.sizes) for e in ALL if e.dtype.code[:2] not in ("BF", "F8")])
        file = file_of(entries)
        (tmp_path / "f").write_bytes(file)
        for loaded in (safetensors.numpy.load_file(tmp_path / "f"), safetensors.numpy.load(file)):
            assert {key: array.tobytes() for key, array in loaded.items()} == {e.key: data_of(file, e) for e in entries}

    def test_torch(self, path: Path) -> None:
        torch = pytest.importorskip("torch")
        load_file = pytest.importorskip("safetensors.torch").load_file
        loaded, file = load_file(path), path.read_bytes()
        assert set(loaded) == {entry.key for entry in ALL}
        for entry in ALL:
            tensor = loaded[entry.key]
            assert tuple(tensor.shape) == entry.dtype.stored_shape(entry.sizes)
            if not entry.dtype.stored_as_bytes:
                assert tensor.dtype == getattr(torch, entry.dtype.name)
            raw = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor
            assert raw.numpy().tobytes() == data_of(file, entry) if tensor.numel() else entry.nbytes == 0

    @pytest.mark.parametrize("name", HOSTILE)
    def test_hostile_names(self, tmp_path: Path, name: str) -> None:
        entries = entries_of([(name, FLOAT32, (1,)), ("other", FLOAT32, (2,))])
        (tmp_path / "f").write_bytes(file_of(entries))
        loaded = safetensors.numpy.load_file(tmp_path / "f")
        assert {key: array.nbytes for key, array in loaded.items()} == {entries[0].key: 4, "other": 8}

    def test_no_entries(self) -> None:
        file = file_of([])
        assert safetensors.numpy.load(file) == {}
        assert parse_header(file, len(file)) == []

    def test_we_read_their_files(self) -> None:
        file = safetensors.numpy.save({"b": np.ones((2, 3), np.int8), "a": np.zeros(4), "format": np.zeros(0, "i4")})
        assert {(e.key, e.dtype.name, e.sizes, e.offsets) for e in parse_header(file, len(file))} == {
            ("b", "int8", (2, 3), (0, 0)),
            ("a", "float64", (4,), (0,)),
            ("format", "int32", (0,), (0,)),
        }


class TestHeader:
    def test_data_starts_at_a_page(self) -> None:
        for count in (0, 1, 50, 200):
            header = build_header(entries_of([(f"w{i}", FLOAT32, (3,)) for i in range(count)]))
            assert len(header) % 4096 == 0
            assert header_length(header[:8], len(header) + count * 12) == len(header)

    def test_data_of_large_files_starts_at_a_block(self) -> None:
        for mib, start in ((63, 4096), (64, BLOCK_BYTES), (1 << 20, BLOCK_BYTES)):
            entries = entries_of([("w", FLOAT32, (mib << 18,))])
            header = build_header(entries)
            assert len(header) == start
            assert parse_header(header, start + (mib << 20)) == entries

    def test_it_is_the_same_every_time(self) -> None:
        assert build_header(ALL) == build_header(list(ALL))
        assert header_digest(build_header(ALL)) == header_digest(build_header(ALL)) != header_digest(build_header([]))
        assert len(header_digest(b"")) == 32

    def test_order_is_that_of_the_data(self) -> None:
        header = json.loads(build_header(ALL)[8:])
        assert list(header) == ["__metadata__", *(entry.key for entry in ALL)]

    def test_only_what_differs_is_noted(self) -> None:
        entries = [
            Entry("whole", FLOAT32, (2, 3), 0, "whole", (2, 3), (0, 0)),
            Entry("rows", FLOAT32, (1, 3), 24, "rows", (4, 3), (2, 0)),
            Entry("first", FLOAT32, (1, 3), 36, "first", (4, 3), (0, 0)),
            Entry("w@3", FLOAT32, (), 48, "w", (), ()),
            Entry("z", dtype_of("complex128"), (1,), 52, "z", (1,), (0,)),
            Entry("bad@5", dtype_of("int4"), (1,), 68, "bad\ud800", (1,), (0,)),
        ]
        file = file_of(entries)
        assert metadata_of(file) == {
            "rows": {"shape": [4, 3], "offsets": [2, 0]},
            "first": {"shape": [4, 3]},
            "w@3": {"name": "w"},
            "z": {"dtype": "complex128"},
            "bad@5": {"name_utf8": "626164eda080", "dtype": "int4"},
        }
        assert parse_header(file, len(file)) == entries

    def test_all_dtypes_come_back(self) -> None:
        file = file_of(ALL)
        key = lambda entry: entry.key  # noqa: E731 - empty entries that start together have no order
        assert sorted(parse_header(file, len(file)), key=key) == sorted(ALL, key=key)

    @pytest.mark.parametrize(
        "entries",
        [
            [Entry("a", FLOAT32, (1,), 4, "a", (1,), (0,))],
            [Entry("a", FLOAT32, (1,), 0, "a", (1,), (0,)), Entry("b", FLOAT32, (1,), 8, "b", (1,), (0,))],
            [Entry("a", FLOAT32, (1,), 0, "a", (1,), (0,)), Entry("b", FLOAT32, (1,), 0, "b", (1,), (0,))],
            [Entry("a", FLOAT32, (1,), 0, "a", (1,), (0,)), Entry("a", FLOAT32, (1,), 4, "b", (1,), (0,))],
            [Entry("__metadata__", FLOAT32, (1,), 0, "a", (1,), (0,))],
        ],
        ids=["hole-first", "hole", "overlap", "duplicate", "reserved"],
    )
    def test_plans_that_make_no_file(self, entries: list[Entry]) -> None:
        with pytest.raises(PlanError):
            build_header(entries)

    def test_too_long(self) -> None:
        with pytest.raises(PlanError, match="split"):
            build_header([Entry("x" * MAX_HEADER_BYTES, FLOAT32, (), 0, "x" * MAX_HEADER_BYTES, (), ())])

    @given(st.lists(st.tuples(st.text() | st.sampled_from(HOSTILE), st.lists(st.integers(0, 2**62), max_size=6))))
    def test_the_upper_bound(self, rows: list[tuple[str, list[int]]]) -> None:
        """Every field noted, numbers as long as they get."""
        keys = choose_keys([name for name, _ in rows])
        entries = []
        start = 2**62
        for key, (name, numbers) in zip(keys, rows, strict=True):
            sizes = (0, *numbers)  # empty, so that any start does
            entries.append(
                Entry(key, dtype_of("complex128"), sizes, start, name, (2**62, *numbers), (2**62,) * len(sizes))
            )
        bound = HEADER_BASE_BYTES + sum(header_upper_bound(e.name, len(e.sizes)) for e in entries)
        unchecked = [Entry("head", dtype_of("uint8"), (2**62,), 0, "head", (2**62,), (0,)), *entries]
        assert len(build_header(unchecked)) <= bound + header_upper_bound("head", 1)


class TestKeys:
    def test_plain_names_stay(self) -> None:
        names = ["a", "a.b", "", "nul\0", "x" * 3000, "😀", "new\nline", "@", "w@", "w@x", "a@1.b"]
        assert choose_keys(names) == names

    def test_others_are_escaped(self) -> None:
        names = ["w", "w", "w@0", "__metadata__", "hyper_ckpt", "format", "a\ud800", "a\\ud800"]
        assert choose_keys(names) == [
            "w@0", "w@1", "w@0@2", "__metadata__@3", "hyper_ckpt@4", "format@5", "a\\ud800@6", "a\\ud800",
        ]  # fmt: skip

    @given(st.lists(st.text(alphabet="w@01\ud800\\", max_size=4) | st.sampled_from(HOSTILE)))
    def test_they_never_collide(self, names: list[str]) -> None:
        keys = choose_keys(names)
        assert len(set(keys)) == len(names)
        assert not set(keys) & {"__metadata__", "hyper_ckpt", "format"}
        assert keys == choose_keys(names)
        for key in keys:
            key.encode()

    @given(st.lists(st.text(max_size=5) | st.sampled_from(HOSTILE), max_size=20))
    def test_names_come_back(self, names: list[str]) -> None:
        file = file_of(entries_of([(name, FLOAT32, (1,)) for name in names]))
        assert [entry.name for entry in parse_header(file, len(file))] == names


def raw(header: bytes | str | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    text = json.dumps(header) if isinstance(header, dict) else header
    text = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def one(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | changes}


def noted(note: Any) -> dict[str, Any]:
    return {"__metadata__": {"hyper_ckpt": note if isinstance(note, str) else json.dumps(note)}, **one()}


U8 = '{"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}'
DAMAGED = {
    "empty file": b"",
    "7 bytes": b"\0" * 7,
    "no header": raw("", length=0),
    "length 1": raw("{", length=1),
    "length 2^63": raw("{}", length=2**63),
    "length 2^64 - 1": raw("{}", length=2**64 - 1),
    "longer than the file": raw("{}", length=3),
    "not JSON": raw("{]"),
    "not UTF-8": raw(b'{"\xff": 1}'),
    "a surrogate in UTF-8": raw(f'{{"\ud800": {U8}}}', bytes(4)),
    "not an object": raw("[]"),
    "deep": raw("[" * 100_000),
    "deeper": raw('{"a":' * 100_000),
    "NUL padded": raw("{}\0\0"),
    "duplicate key": raw(f'{{"w": {U8}, "w": {U8}}}', bytes(4)),
    "duplicate metadata": raw('{"__metadata__": {}, "__metadata__": {}}'),
    "duplicate field": raw('{"w": {"dtype": "U8", "dtype": "I8", "shape": [4], "data_offsets": [0, 4]}}', bytes(4)),
    "duplicate note": raw(noted('{"w": {}, "w": {}}'), bytes(4)),
    "entry is no object": raw({"w": 1}),
    "metadata is no object": raw({"__metadata__": []}),
    "metadata is no string": raw({"__metadata__": {"a": 1}}),
    "field missing": raw({"w": {"dtype": "U8", "shape": []}}, b"1"),
    "unknown dtype": raw(one(dtype="F4"), bytes(4)),
    "dtype is no string": raw(one(dtype=1), bytes(4)),
    "shape is no list": raw(one(shape=4), bytes(4)),
    "shape of bool": raw(one(shape=[True, 4]), bytes(4)),
    "shape of float": raw(one(shape=[4.0]), bytes(4)),
    "shape of NaN": raw('{"w": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 4]}}', bytes(4)),
    "negative shape": raw(one(shape=[-2, -2]), bytes(4)),
    "shape too small": raw(one(shape=[3]), bytes(4)),
    "shape too large": raw(one(shape=[5]), bytes(4)),
    "shape wraps around": raw(one(shape=[2**32, 2**32], data_offsets=[0, 0])),
    "number of 10,000 digits": raw('{"w": {"dtype": "U8", "shape": [' + "9" * 10_000 + '], "data_offsets": [0, 4]}}'),
    "one offset": raw(one(data_offsets=[4]), bytes(4)),
    "three offsets": raw(one(data_offsets=[0, 4, 4]), bytes(4)),
    "negative offset": raw(one(data_offsets=[-4, 0]), bytes(4)),
    "offsets reversed": raw(one(data_offsets=[4, 0]), bytes(4)),
    "hole before": raw(one(data_offsets=[1, 5]), bytes(5)),
    "hole between": raw({**one(), "v": {"dtype": "U8", "shape": [1], "data_offsets": [5, 6]}}, bytes(6)),
    "overlap": raw({**one(), "v": {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]}}, bytes(5)),
    "the same bytes twice": raw({**one(), "v": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, bytes(4)),
    "empty entry in the middle of another": raw(
        {**one(), "v": {"dtype": "U8", "shape": [0], "data_offsets": [2, 2]}}, bytes(4)
    ),
    "empty entry behind the end": raw({**one(), "v": {"dtype": "U8", "shape": [0], "data_offsets": [9, 9]}}, bytes(4)),
    "cut short": raw(one(), bytes(3)),
    "bytes behind": raw(one(), bytes(5)),
    "notes are not JSON": raw(noted("{"), bytes(4)),
    "notes are no object": raw(noted([]), bytes(4)),
    "note is no object": raw(noted({"w": 1}), bytes(4)),
    "note on nothing": raw(noted({"v": {}}), bytes(4)),
    "note of wrong type": raw(noted({"w": {"shape": "4"}}), bytes(4)),
    "outside the tensor": raw(noted({"w": {"shape": [5], "offsets": [2]}}), bytes(4)),
    "larger than the tensor": raw(noted({"w": {"shape": [3]}}), bytes(4)),
    "other dimensions": raw(noted({"w": {"shape": [4, 1]}}), bytes(4)),
    "other dimensions of offsets": raw(noted({"w": {"offsets": [0, 0]}}), bytes(4)),
    "negative note": raw(noted({"w": {"shape": [5], "offsets": [-1]}}), bytes(4)),
    "logical dtype of another code": raw(noted({"w": {"dtype": "float32"}}), bytes(4)),
    "logical dtype that needs none": raw(noted({"w": {"dtype": "uint8"}}), bytes(4)),
    "unknown logical dtype": raw(noted({"w": {"dtype": "float2"}}), bytes(4)),
    "complex128 of 4 bytes": raw(noted({"w": {"dtype": "complex128"}}), bytes(4)),
    "name is not hex": raw(noted({"w": {"name_utf8": "zz"}}), bytes(4)),
    "name is not UTF-8": raw(noted({"w": {"name_utf8": "ff"}}), bytes(4)),
}


class TestDamage:
    @pytest.mark.parametrize("file", DAMAGED.values(), ids=DAMAGED)
    def test_it_is_refused(self, file: bytes) -> None:
        with pytest.raises(HeaderError):
            parse_header(file, len(file))

    def test_what_they_differ_from_is_accepted(self) -> None:
        for header in (one(), noted({}), noted({"w": {"shape": [6], "offsets": [2], "name": "v"}})):
            file = raw(header, bytes(4))
            assert len(parse_header(file, len(file))) == 1

    def test_less_was_read_than_the_header(self) -> None:
        file = file_of(ALL)
        with pytest.raises(HeaderError, match="were read"):
            parse_header(file[:100], len(file))

    @pytest.mark.parametrize(
        "shape",
        [lambda: [2**62] * 200_000, lambda: [2**62] * 200_000 + [0], lambda: [1] * 500_000],
        ids=["huge", "huge-and-empty", "ones"],
    )
    def test_many_dimensions_cost_no_time(self, shape: Callable[[], list[int]]) -> None:
        dims = shape()
        size = 0 if math.prod(dims[-1:]) == 0 else 1
        file = raw(one(shape=dims, data_offsets=[0, size]), bytes(size))
        begin = time.perf_counter()
        with contextlib.suppress(HeaderError):
            parse_header(file, len(file))
        assert time.perf_counter() - begin < 5

    @given(st.data())
    def test_flipped_bytes_raise_nothing_else(self, data: st.DataObject) -> None:
        file = bytearray(raw(noted({"w": {"shape": [6], "offsets": [2]}}), bytes(4)))
        for _ in range(data.draw(st.integers(1, 3))):
            file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
        try:
            (entry,) = parse_header(bytes(file), len(file))
        except HeaderError:
            return
        assert entry.nbytes == 4
