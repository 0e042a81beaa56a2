"""What is no tensor is decoded before any tensor is filled: what is damaged or cannot be set changes nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.errors import CheckpointError, DigestError, TargetError
from hyper_ckpt.testing.world import run_world

W = np.arange(1000.0)


class Holder:
    """An object with a state_dict, which takes whatever it is given."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def untouched(target: dict[str, Any]) -> bool:
    holder = target["o"].state if isinstance(target["o"], Holder) else target["o"]
    return not target["w"].any() and target["step"] == 0 and holder == {"a": 0}


@pytest.mark.parametrize("verify", ["before", "during"])
@pytest.mark.parametrize("world", [1, 2])
def test_damage_in_what_an_object_has_besides(tmp_path: Path, verify: Any, world: int) -> None:
    saved = {"w": W, "o": Holder(a=1, big="x" * 200_000), "step": 5}
    hyper_ckpt.save(saved, tmp_path / "c", no_dist=True)
    (file,) = (tmp_path / "c").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[data.find(b"xxxxxxxx") + 50_000] ^= 1
    file.write_bytes(data)

    def job(platform: Platform) -> bool:
        # Only rank 0 has an object, which is given also what it does not have.
        own = Holder(a=0) if platform.ranks.rank == 0 else {"a": 0}
        target = {"w": np.zeros(1000), "o": own, "step": 0}
        with pytest.raises(DigestError, match="o/big"):
            hyper_ckpt.load(target, tmp_path / "c", platform=platform, verify=verify, timeout=20)
        return untouched(target)

    assert all(run_world(world, job))


def test_a_target_of_one_rank_that_cannot_be_set(tmp_path: Path) -> None:
    one, two = np.random.default_rng(1), np.random.default_rng(2)
    saved = {"w": W, "o": {"a": 1}, "step": 5, "one": one, "two": two}
    hyper_ckpt.save(saved, tmp_path / "c", no_dist=True)

    def job(platform: Platform) -> bool:
        one = np.random.default_rng(0)
        two = one if platform.ranks.rank == 1 else np.random.default_rng(0)
        target = {"w": np.zeros(1000), "o": {"a": 0}, "step": 0, "one": one, "two": two}
        with pytest.raises(TargetError, match="one Generator in the target"):
            hyper_ckpt.load(target, tmp_path / "c", platform=platform, timeout=20)
        first = np.random.default_rng(0).bit_generator.state
        return untouched(target) and one.bit_generator.state == two.bit_generator.state == first

    assert all(run_world(2, job))


def test_an_object_that_refuses_its_state_is_everybodys_error(tmp_path: Path) -> None:
    hyper_ckpt.save({"w": W, "o": Holder(a=1)}, tmp_path / "c", no_dist=True)

    class Refuses(Holder):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("not mine")

    def job(platform: Platform) -> str:
        own = (Refuses if platform.ranks.rank == 1 else Holder)(a=0)
        with pytest.raises((CheckpointError, ValueError)) as refused:
            hyper_ckpt.load({"w": np.zeros(1000), "o": own}, tmp_path / "c", platform=platform, timeout=20)
        return str(refused.value)

    (text,) = set(run_world(2, job))
    assert "rank 1" in text
    assert "not mine" in text
