"""show: summary, tensors, values, chunks, files; at 80 columns and as JSON."""

import json
import struct
from collections.abc import Callable
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from click.testing import Result

import hyper_ckpt
from hyper_ckpt import ShardedTensor
from hyper_ckpt.storage.memory_store import MemoryStore
from hyper_ckpt.testing.world import run_world

from ._world import LONG, process, save_by_four

Run = Callable[..., Result]


def lines_of(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def row(lines: list[str], start: str) -> list[str]:
    (line,) = [line for line in lines if line.startswith(start)]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_summary(run: Run, checkpoint: Path) -> None:
    lines = lines_of(run("show", checkpoint))
    facts = {line[:10].strip(): line[12:] for line in lines[: lines.index("")] if line[0] != " "}
    save_id = hyper_ckpt.read_metadata(checkpoint).save_id
    nbytes = 8 * 8 * 4 + 8 * 8 * 2 + 3 * 5 * 4
    assert facts["checkpoint"] == str(checkpoint)
    assert facts["save id"] == f"{save_id}, format version 1"
    assert facts["saved"].endswith("by 4 ranks")
    assert facts["stored"].endswith("in 4 files")
    assert facts["tensors"] == f"4: {64 + 64 + 15} elements, {nbytes} B"  # tied ones count once
    assert facts["values"] == "5, 1 of them per rank"
    assert facts["metadata"] == "{'run': 'a'}"


def test_tensors_and_values(run: Run, checkpoint: Path) -> None:
    lines = lines_of(run("show", checkpoint))
    assert row(lines, "TENSOR") == ["TENSOR", "DTYPE", "SHAPE", "SPLIT", "SIZE"]
    name, *rest = row(lines, "model/layers")
    assert rest == ["float32", "(8,8)", "4 x (2,·)", "256 B"]
    head, _, tail = name.partition("…")
    assert f"model/{LONG}".startswith(head)
    assert LONG.endswith(tail)
    assert len(tail) >= len(head) > 5
    assert row(lines, "model/grid")[1:] == ["int16", "(8,8)", "grid 2x2 (4,4)", "128 B"]
    assert row(lines, "model/embedding")[1:] == ["float32", "(3,5)", "whole", "60 B"]
    assert row(lines, "model/head")[3] == "tied: model/embedding"
    shown = lines[-5:]
    assert shown == [
        "optimizer/lr = 0.001",
        "optimizer/betas = (0.9, 0.999)",
        "optimizer/eps = nan",
        "rng = <one of each rank>",
        "step = 7",
    ]


def test_it_fits_80_columns_in_a_pipe(checkpoint: Path) -> None:
    for args in (["show"], ["show", "--files"], ["show", "--tensor", f"model/{LONG}"], ["show", "--tensor", "*grid"]):
        done = process(*args, checkpoint)
        assert (done.returncode, done.stderr) == (0, "")
        lines = [line for line in done.stdout.splitlines() if line != f"model/{LONG}" and str(checkpoint) not in line]
        assert max(map(len, lines)) <= 80
        assert "\x1b" not in done.stdout
    wide = process("show", checkpoint, COLUMNS="200")
    assert f"model/{LONG}" in wide.stdout


def test_json_is_complete(run: Run, checkpoint: Path) -> None:
    facts = json.loads(run("show", checkpoint, "--json").stdout)
    metadata = hyper_ckpt.read_metadata(checkpoint)
    assert list(facts) == [
        "checkpoint", "save_id", "format_version", "world_size", "absent_ranks", "created", "nbytes", "elements",
        "tensor_bytes", "user_metadata", "files", "conflicts", "values", "tensors",
    ]  # fmt: skip
    assert (facts["save_id"], facts["world_size"]) == (metadata.save_id, 4)
    assert {f["name"]: f["nbytes"] for f in facts["files"]} == metadata.files
    assert facts["user_metadata"]["value"] == {"run": "a"}
    assert facts["conflicts"] == {}
    for tensor in facts["tensors"]:
        stored = [
            {"copy": at.copy, "offsets": list(i.offset or ()), "file": at.relative_path, "offset": at.offset,
             "length": at.length}
            for i, at in metadata.storage_data[tensor["name"]]
        ]  # fmt: skip
        assert [{k: v for k, v in chunk.items() if k != "sizes"} for chunk in tensor["chunks"]] == stored
    by_name = {t["name"]: t for t in facts["tensors"]}
    assert by_name[f"model/{LONG}"]["split"] == "4 x (2,·)"
    assert by_name["model/head"]["tied_to"] == "model/embedding"
    values = {v["name"]: v for v in facts["values"]}
    assert values["optimizer/betas"] == {
        "name": "optimizer/betas", "kind": "plain", "type": "tuple", "repr": "(0.9, 0.999)", "value": [0.9, 0.999],
    }  # fmt: skip
    assert (values["optimizer/eps"]["repr"], values["optimizer/eps"]["value"]) == ("nan", None)
    assert values["rng"]["kind"] == "per_rank"


def test_chunks_say_where_the_bytes_are(run: Run, checkpoint: Path) -> None:
    lines = lines_of(run("show", checkpoint, "--tensor", f"model/{LONG}"))
    assert lines[0] == f"model/{LONG}"
    assert row(lines, "FILE") == ["FILE", "OFFSETS", "SIZES", "OFFSET", "LENGTH"]
    file, offsets, sizes, offset, length = row(lines, "rank-00002")
    assert (offsets, sizes, length) == ("(4,0)", "(2,8)", "64")
    data = (checkpoint / file).read_bytes()[int(offset) : int(offset) + int(length)]
    assert struct.unpack("<16f", data) == tuple(range(32, 48))


def test_patterns_of_tensors(run: Run, checkpoint: Path) -> None:
    assert [line for line in lines_of(run("show", checkpoint, "--tensor", "model/*d")) if line.startswith("model")] == [
        "model/grid",
        "model/head",
    ]
    facts = json.loads(run("show", checkpoint, "--tensor", "model/gri?", "--json").stdout)
    assert [t["name"] for t in facts["tensors"]] == ["model/grid"]
    absent = run("show", checkpoint, "--tensor", "model")
    assert absent.exit_code == 4
    assert "no tensor 'model'; 'model/*' matches 4" in absent.stderr


def test_files(run: Run, checkpoint: Path) -> None:
    lines = lines_of(run("show", checkpoint, "--files"))
    for path in checkpoint.glob("*.safetensors"):
        assert row(lines, path.name)[-1] == f"{path.stat().st_size:,}"


def test_copies(run: Run, tmp_path: Path) -> None:
    save_by_four(str(tmp_path / "copies"), remove_redundancy=False)
    lines = lines_of(run("show", tmp_path / "copies"))
    assert row(lines, "model/embedding")[3] == "whole, 4 copies"
    chunks = lines_of(run("show", tmp_path / "copies", "--tensor", "model/embedding"))
    assert [row(chunks, f"rank-0000{rank}")[1] for rank in range(4)] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("boxes", "shape", "expected"),
    [
        ([((0,), (3,)), ((3,), (3,)), ((6,), (1,))], (7,), "3 x (1..3,)"),
        ([((0, 0, 0), (2, 2, 1)), ((0, 0, 1), (2, 2, 1))], (2, 2, 2), "2 x (·,·,1)"),
        ([((0, 0), (1, 2)), ((1, 0), (1, 1)), ((1, 1), (1, 1))], (2, 2), "3 boxes"),
        ([((), ())], (), "whole"),
        ([((0, 0), (0, 4))], (0, 4), "no bytes"),
    ],
)
def test_splits(run: Run, tmp_path: Path, boxes: Any, shape: tuple[int, ...], expected: str) -> None:
    tensor = ShardedTensor([(np.zeros(sizes, np.float32), offsets) for offsets, sizes in boxes], shape)
    hyper_ckpt.save({"w": tensor}, tmp_path / "c", durable=False)
    assert row(lines_of(run("show", tmp_path / "c")), "w ")[3] == expected


class Color(Enum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    ("value", "expected", "exact"),
    [
        (None, "None", None),
        (True, "True", True),
        (1 << 80, str(1 << 80), 1 << 80),
        (-(1 << 80), str(-(1 << 80)), -(1 << 80)),
        (float("-inf"), "-inf", None),
        (1 + 2j, "(1+2j)", None),
        ("a'b", '"a\'b"', "a'b"),
        ("\ud800", "'\\ud800'", None),
        (b"ab", "b'ab'", None),
        (bytearray(b"ab"), "bytearray(b'ab')", None),
        (range(1, 9, 2), "range(1, 9, 2)", None),
        (slice(1, None), "slice(1, None, None)", None),
        ({3, 1}, "{1, 3}", None),
        (set(), "set()", None),
        (frozenset({1}), "frozenset({1})", None),
        ([], "[]", []),
        ({}, "{}", {}),
        ((1,), "(1,)", [1]),
        ([1, [2, "c"]], "[1, [2, 'c']]", [1, [2, "c"]]),
        (Point(1, 2), "Point(x=1, y=2)", None),
        (Color.RED, "Color.RED", None),
        (np.float32(1.5), "1.5", None),
        (Decimal("1.10"), "Decimal('1.10')", None),
        (Path("/a"), "PosixPath('/a')", None),
        (list(range(30_000)), "<large list of 30,000 items, 165 KiB, in a file of rank 0>", None),
    ],
    ids=lambda value: f"{value!r:.20}",
)
def test_values(run: Run, tmp_path: Path, value: Any, expected: str, exact: Any) -> None:
    hyper_ckpt.save({"key": value}, tmp_path / "c", durable=False)
    (facts,) = json.loads(run("show", tmp_path / "c", "--json").stdout)["values"]
    assert (facts["repr"], facts["value"]) == (expected, exact)
    assert lines_of(run("show", tmp_path / "c"))[-1] == f"key = {expected}"


def test_values_that_ranks_disagree_on(run: Run, tmp_path: Path) -> None:
    def rank_main(platform: Any) -> None:
        hyper_ckpt.save({"seed": platform.ranks.rank // 3}, tmp_path / "c", platform=platform, durable=False)

    with pytest.warns(UserWarning, match="seed"):
        run_world(4, rank_main)
    assert lines_of(run("show", tmp_path / "c"))[-1] == "seed = 0 on ranks 0-2; 1 on rank 3"


def test_long_values_and_names_lose_what_does_not_fit(run: Run, tmp_path: Path) -> None:
    state = {"a" * 30: "x" * 200, "b" * 200: 1, "c" * 200: "y" * 200, "語" * 60: 2}
    hyper_ckpt.save(state, tmp_path / "c", durable=False)
    a, b, c, wide = lines_of(run("show", tmp_path / "c"))[-4:]
    assert a.startswith("a" * 30 + " = 'xxx")
    assert a.endswith("x…")
    assert b.endswith("b = 1")
    assert "…" in b
    assert (len(a), len(b), len(c)) == (80, 80, 80)
    assert 78 <= len(wide) + wide.count("語") <= 80  # each takes two columns


def test_many_tensors(run: Run, tmp_path: Path) -> None:
    one = np.zeros(3, np.uint8)
    state = {
        "m": {f"layers.{i}": one.copy() for i in range(3000)},
        "o": {"k": one},
        "p": dict.fromkeys(map(str, range(300)), 0),
    }
    hyper_ckpt.save(state, tmp_path / "c", durable=False)
    lines = lines_of(run("show", tmp_path / "c"))
    assert "            m: 3,000, 9,000 elements, 8.79 KiB" in lines
    assert "... and 2,801 more tensors (--limit 0 shows all)" in lines
    assert "... and 100 more values (--limit 0 shows all)" in lines
    assert sum("layers." in line for line in lines) == 200
    assert sum("layers." in line for line in lines_of(run("show", tmp_path / "c", "--limit", "0"))) == 3000
    assert len(json.loads(run("show", tmp_path / "c", "--json", "--limit", "1").stdout)["tensors"]) == 3001


def test_an_empty_state(run: Run, tmp_path: Path) -> None:
    hyper_ckpt.save({}, tmp_path / "c", durable=False)
    assert "tensors     0: 0 elements, 0 B" in lines_of(run("show", tmp_path / "c"))


def test_urls(run: Run) -> None:
    try:
        save_by_four("memory://cli/run/step-7")
        assert "checkpoint  memory://cli/run/step-7" in lines_of(run("show", "memory://cli/run/step-7"))
        assert lines_of(run("verify", "memory://cli/run/step-7"))[-1].startswith("ok: memory://cli/run/step-7")
    finally:
        MemoryStore.drop_bucket("cli")


def test_tensors_that_differ_between_ranks(run: Run, tmp_path: Path) -> None:
    def job(platform: Any) -> None:
        rank = platform.ranks.rank
        state = {"model": {"expert": np.full((2, 2), rank // 2), "w": np.ones(3)}}
        hyper_ckpt.save(state, tmp_path / "c", platform=platform)

    with pytest.warns(UserWarning, match="expert"):
        run_world(4, job)
    lines = lines_of(run("show", tmp_path / "c"))
    (line,) = [line for line in lines if line.startswith("conflicts")]
    assert line.endswith("1 tensor differed between ranks, each rank's is kept: model/expert of ranks 0-1 / 2-3")
    assert row(lines, "model/expert~r2") == ["model/expert~r2", "int64", "(2,2)", "whole", "32 B"]
    assert "model/expert = <tensor ~r0> on ranks 0-1; <tensor ~r2> on ranks 2-3" in lines
    names = [line for line in lines_of(run("show", tmp_path / "c", "--tensor", "model/expert")) if line[:5] == "model"]
    assert names == ["model/expert~r0", "model/expert~r2"]
    facts = json.loads(run("show", tmp_path / "c", "--json").stdout)
    assert facts["conflicts"] == {
        "model/expert": [{"ranks": [0, 1], "tensor": "model/expert~r0"}, {"ranks": [2, 3], "tensor": "model/expert~r2"}]
    }
