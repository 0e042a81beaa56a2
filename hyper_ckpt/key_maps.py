"""Ready values for `LoadOptions(map_keys=...)`: how PyTorch and MindSpore name what is the same.

Only names are mapped. What the frameworks also shape differently (the weights of a 1-d convolution, the count of
an optimizer's steps) is refused or left out by the load as any other mismatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

KeyMapping = Callable[[str], list[str]]

_TO_TORCH = {
    "gamma": "weight",
    "beta": "bias",
    "embedding_table": "weight",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}
_OPTIMIZER_TO_TORCH = {
    "moment1": "exp_avg",
    "adam_m": "exp_avg",
    "exp_avg": "exp_avg",
    "moment2": "exp_avg_sq",
    "adam_v": "exp_avg_sq",
    "exp_avg_sq": "exp_avg_sq",
    "vhat": "max_exp_avg_sq",
    "moments": "momentum_buffer",
    "accum": "momentum_buffer",
    "momentum_buf": "momentum_buffer",
}


def from_torch(roots: Mapping[str, str] | None = None) -> KeyMapping:
    """For a MindSpore target and a checkpoint of PyTorch.

    Parameters of `Cell.parameters_dict()` are looked for as those of `Module.state_dict()`, and parameters of an
    optimizer (`moment1.fc.weight`) as `get_optimizer_state_dict` of PyTorch names them (`state/fc.weight/exp_avg`).

    Args:
        roots: the saved first key of a first key of the target, where they differ: `{"net": "model"}`.
    """

    def candidates(name: str) -> list[str]:
        root, rest = _rooted(name, roots)
        out = [root + rest, root + _last_renamed(rest, _TO_TORCH)]
        kind, _, parameter = rest.partition(".")
        if kind in _OPTIMIZER_TO_TORCH and parameter:
            out.append(f"{root}state/{_last_renamed(parameter, _TO_TORCH)}/{_OPTIMIZER_TO_TORCH[kind]}")
        return list(dict.fromkeys(out))

    return candidates


def from_mindspore(roots: Mapping[str, str] | None = None) -> KeyMapping:
    """For a PyTorch target and a checkpoint of MindSpore; the opposite of `from_torch`."""

    def candidates(name: str) -> list[str]:
        root, rest = _rooted(name, roots)
        out = [root + rest, *(root + each for each in _sources(rest))]
        parts = rest.split("/")
        if parts[0] == "state" and len(parts) == 3:
            kinds = [kind for kind, torch_kind in _OPTIMIZER_TO_TORCH.items() if torch_kind == parts[2]]
            out += [f"{root}{kind}.{each}" for kind in kinds for each in (parts[1], *_sources(parts[1]))]
        return list(dict.fromkeys(out))

    return candidates


def _rooted(name: str, roots: Mapping[str, str] | None) -> tuple[str, str]:
    """The first key with its slash, as it was saved, and what follows; no first key for a flat state."""
    root, slash, rest = name.partition("/")
    if not slash:
        return "", root
    return (roots or {}).get(root, root) + "/", rest


def _last_renamed(name: str, table: Mapping[str, str]) -> str:
    """A name with its last part, after the last dot or slash, changed as the table says."""
    at = max(name.rfind("."), name.rfind("/")) + 1
    return name[:at] + table.get(name[at:], name[at:])


def _sources(name: str) -> list[str]:
    """What MindSpore may call a parameter of PyTorch."""
    at = max(name.rfind("."), name.rfind("/")) + 1
    return [name[:at] + each for each, torch_name in _TO_TORCH.items() if torch_name == name[at:]]
