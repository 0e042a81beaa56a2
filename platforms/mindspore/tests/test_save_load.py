"""Real mccl runs: saved in one distribution, loaded in another, every byte compared."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyper_ckpt

State = dict[str, Any]
# Global shape and, by number of ranks, device matrix and tensor map. What is not listed lies whole on every rank.
SHAPES = {"up.weight": (12, 8), "up.bias": (12,), "down.weight": (8, 12), "norm.gamma": (8,)}
DISTRIBUTIONS = {
    "rows": lambda n: {name: ((n,), (0,) + (-1,) * (len(SHAPES[name]) - 1)) for name in ("up.weight", "up.bias")},
    "columns": lambda n: {"up.weight": ((n,), (-1, 0)), "down.weight": ((n,), (-1, 0))},
    "grid": lambda n: {
        "up.weight": ((n // 2, 2), (1, 0)),
        "down.weight": ((n // 2, 2), ((0, 1), -1)),
        "up.bias": ((2, n // 2), (1,)),
    },
    "whole": lambda n: {},
}  # fmt: skip


def whole(name: str) -> np.ndarray:
    seed = sum(map(ord, name))
    return np.random.default_rng(seed).standard_normal(SHAPES[name.removeprefix("moment1.")]).astype(np.float32)


def make(kind: str, rank: int, world_size: int, *, zero: bool) -> tuple[State, Any]:
    """A model and its first moments, as parameters of the local shapes, and the platform that knows their layouts."""
    import mccl_world
    import mindspore as ms

    from hyper_ckpt_mindspore.layouts import Layouts
    from hyper_ckpt_mindspore.platform import MindSporePlatform

    layouts = {}
    for name, (matrix, tensor_map) in DISTRIBUTIONS[kind](world_size).items():
        for each in (name, f"moment1.{name}"):
            layouts[each] = [{"device_matrix": matrix, "tensor_map": tensor_map}, "Float32", SHAPES[name]]
    platform = MindSporePlatform(mccl_world.group(world_size), layouts=layouts)
    own = Layouts(range(world_size), rank, layouts)
    parameters = {}
    for name in [*SHAPES, *(f"moment1.{name}" for name in SHAPES)]:
        value = whole(name)
        if name in layouts:
            found = own.of(ms.Parameter(ms.Tensor(np.zeros((1,) * value.ndim, np.float32)), name=name))
            value = value[tuple(slice(o, o + n) for o, n in zip(*found.box, strict=True))]
        parameters[name] = ms.Parameter(ms.Tensor(np.ascontiguousarray(value * (not zero))), name=name)
    model = {name: value for name, value in parameters.items() if name in SHAPES}
    # As an optimizer of MindSpore has it: its state holds the weights once more.
    return {"model": model, "optimizer": {**parameters, "step": ms.Tensor(np.int32(0 if zero else 7))}}, platform


def raw(state: State) -> dict[str, bytes]:
    return {name: value.asnumpy().tobytes() for part in ("model", "optimizer") for name, value in state[part].items()}


def save_kind(rank: int, world_size: int, kind: str, path: str) -> None:
    state, platform = make(kind, rank, world_size, zero=False)
    hyper_ckpt.save({**state, "epoch": 3, "seed": hyper_ckpt.PerRank(rank)}, path, platform=platform)


def load_kind(rank: int, world_size: int, kind: str, path: str, share: bool) -> bool:
    state, platform = make(kind, rank, world_size, zero=True)
    expected, _ = make(kind, rank, world_size, zero=False)
    target = {**state, "epoch": 0}
    report = hyper_ckpt.load(target, path, platform=platform, share_reads=share)
    assert not report.missing
    assert target["epoch"] == 3
    return raw(state) == raw(expected)


CASES = [
    ("rows", 4, "columns", 2), ("rows", 4, "rows", 3), ("grid", 4, "whole", 3), ("columns", 4, "grid", 2),
    ("whole", 2, "grid", 4), ("grid", 4, "rows", 2),
]  # fmt: skip


@pytest.mark.parametrize(("saved", "save_ranks", "loaded", "load_ranks"), CASES)
def test_any_distribution_to_any_other(
    mccl: Any, tmp_path: Path, saved: str, save_ranks: int, loaded: str, load_ranks: int
) -> None:
    path = str(tmp_path / "checkpoint")
    mccl(save_kind, saved, path, world_size=save_ranks)
    for share in (True, False):
        assert mccl(load_kind, loaded, path, share, world_size=load_ranks) == [True] * load_ranks
    found = hyper_ckpt.read(path)
    assert {n: v.tobytes() for n, v in found["model"].items()} == {n: whole(n).tobytes() for n in SHAPES}
    assert hyper_ckpt.verify(path).ok


def test_replicas_and_ties_are_stored_once(mccl: Any, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    mccl(save_kind, "grid", str(path), world_size=4)
    metadata = hyper_ckpt.read_metadata(path)
    weights = sum(int(np.prod(shape)) for shape in SHAPES.values())
    places = {place for chunks in metadata.storage_data.values() for _, place in chunks}
    tensors = sum(place.length for place in places)
    # Weights and moments, each element once, the step; and the ranks' own seeds, which are small.
    assert 2 * 4 * weights + 4 <= tensors <= 2 * 4 * weights + 4 + 200
    for name in SHAPES:
        assert {p for _, p in metadata.storage_data[f"model/{name}"]} == {
            p for _, p in metadata.storage_data[f"optimizer/{name}"]
        }


def in_graph_mode(rank: int, world_size: int, path: str) -> bool:
    """Collectives and copies are called as always; only the training is compiled."""
    import mindspore as ms

    before = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        save_kind(rank, world_size, "rows", path)
        return load_kind(rank, world_size, "columns", path, True)
    finally:
        ms.set_context(mode=before)


def test_graph_mode(mccl: Any, tmp_path: Path) -> None:
    assert mccl(in_graph_mode, str(tmp_path / "checkpoint"), world_size=2) == [True, True]


def train(rank: int, world_size: int, path: str, resume: bool) -> tuple[dict[str, bytes], int]:
    """Data-parallel training with an optimizer of MindSpore, saved after four steps or resumed there."""
    import mccl_world
    import mindspore as ms
    from mindspore import mint, nn

    from hyper_ckpt_mindspore.platform import MindSporePlatform

    ms.set_seed(11 if resume else 5)
    platform = MindSporePlatform(mccl_world.group(world_size))
    net = nn.SequentialCell(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 2))
    optimizer = nn.Adam(net.trainable_params(), learning_rate=0.05)
    x = ms.Tensor(np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32))

    def loss() -> Any:
        return mint.mean((net(x) - 1.0) ** 2)

    step = ms.value_and_grad(loss, None, optimizer.parameters)

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer(step()[1])

    state = {"model": net.parameters_dict(), "optimizer": optimizer.state_dict(), "step": 0}
    if resume:
        run(1)  # whatever it was compiled with must not stay
        hyper_ckpt.load(state, path, platform=platform)
    else:
        run(4)
        state["step"] = 4
        hyper_ckpt.save(state, path, platform=platform)
    run(3)
    return {name: value.asnumpy().tobytes() for name, value in optimizer.parameters_dict().items()}, state["step"]


def test_training_goes_on_where_it_was(mccl: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    (expected, _), *_ = mccl(train, path, False, world_size=3)
    for got, step in mccl(train, path, True, world_size=2):
        assert step == 4
        assert got == expected


def save_in_the_background(rank: int, world_size: int, path: str) -> None:
    """Training goes on at once, and with it MindSpore's collectives."""
    import mccl_world
    import mindspore as ms
    from mindspore import mint

    from hyper_ckpt_mindspore.platform import MindSporePlatform

    platform = MindSporePlatform(mccl_world.group(world_size))
    weight = ms.Parameter(ms.Tensor(np.ones((300, 300), np.float32)), name="w")
    handles = []
    for step in range(4):
        handles.append(hyper_ckpt.async_save({"w": weight, "step": step}, f"{path}-{step}", platform=platform))
        handles[-1].wait_staged()
        for _ in range(5):
            weight.copy_(mint.matmul(weight, weight) / 600.0 + 0.25)
        assert platform.ranks.all_gather_object(step) == [step] * world_size
    for handle in handles:
        handle.result(timeout=30.0)
    platform.ranks.all_gather_object(None)


def test_saves_in_the_background(mccl: Any, tmp_path: Path) -> None:
    mccl(save_in_the_background, str(tmp_path / "c"), world_size=2)
    value = np.float32(1)
    for step in range(4):
        saved = hyper_ckpt.read(tmp_path / f"c-{step}")
        assert saved["step"] == step
        assert np.allclose(saved["w"], value, rtol=1e-3)
        for _ in range(5):
            value = value * value / 2 + np.float32(0.25)


def save_fails_on_rank_1(rank: int, world_size: int, path: str) -> str:
    import mccl_world
    import mindspore as ms

    from hyper_ckpt_mindspore.platform import MindSporePlatform

    platform = MindSporePlatform(mccl_world.group(world_size))
    weight = ms.Tensor(np.ones(3, np.float32))
    with pytest.raises(hyper_ckpt.CheckpointError) as caught:
        hyper_ckpt.save({"w": weight} if rank != 1 else {"w": weight, "bad": object()}, path, platform=platform)
    # The same group goes on.
    hyper_ckpt.save({"w": weight}, path, platform=platform)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_one_ranks_error_is_everybodys(mccl: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    errors = mccl(save_fails_on_rank_1, path, world_size=3)
    assert len(set(errors)) == 1
    assert errors[0].startswith("UnsupportedTypeError: ")
    assert "rank 1" in errors[0]
    assert hyper_ckpt.read(path)["w"].tolist() == [1.0, 1.0, 1.0]


def save_pipeline(rank: int, world_size: int, path: str) -> None:
    """Two stages of two ranks each, sharded inside the stage by a layout with its rank_list."""
    import mindspore as ms

    from hyper_ckpt_mindspore.platform import MindSporePlatform

    stage = rank // 2
    entry = {"device_matrix": (2,), "tensor_map": (0, -1), "rank_list": [2 * stage, 2 * stage + 1]}
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)[2 * (rank % 2) : 2 * (rank % 2) + 2] + 100 * stage
    state = {
        f"stage{stage}": {"w": ms.Parameter(ms.Tensor(rows.copy()), name=f"stage{stage}.w")},
        "embedding": ms.Tensor(np.arange(6.0)),
    }
    hyper_ckpt.save(state, path, platform=MindSporePlatform(layouts={f"stage{stage}.w": entry}))


def test_pipeline_stages_make_one_checkpoint(mccl: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    mccl(save_pipeline, path)
    found = hyper_ckpt.read(path)
    for stage in range(2):
        assert np.array_equal(found[f"stage{stage}"]["w"], np.arange(12).reshape(4, 3) + 100 * stage)
    assert found["embedding"].tolist() == list(range(6))
