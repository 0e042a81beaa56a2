"""A training as one state: models, optimizers, and whatever else has to survive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel

from hyper_ckpt.contracts.objects import MissingTensor
from hyper_ckpt.errors import TargetError, UnsupportedStateError
from hyper_ckpt_torch.names import named_parameters, unwrapped
from hyper_ckpt_torch.objects import check_optimizer, like_parameter, load_optimizer, weights_of

Models = nn.Module | Mapping[str, Any] | Sequence[Any]
Optimizers = torch.optim.Optimizer | Mapping[str, Any] | Sequence[Any]


class TrainState(dict[str, Any]):
    """What `hyper_ckpt.save`, `async_save`, `load` and a `CheckpointManager` take as the state of a training.

    state = TrainState(model, optimizer, scheduler=scheduler, step=0)
    manager.restore(state)  # or hyper_ckpt.load(state, path): sets all of it
    state["step"] += 1

    Models and optimizers are stored by the names of parameters in the model, without what DistributedDataParallel,
    DataParallel, torch.compile, FSDP and activation checkpointing add to them: saved with wrappers, loaded without, and
    the reverse. It is the form of torch's `get_state_dict`: either loads what the other has saved.

    To make one, and to look for a checkpoint that is not there, changes nothing. Where one is found, an optimizer that
    has made no step gets the saved moments, each sharded like its parameter.

    Args:
        model: a module; or several, by name or in a list. A dict of tensors by name may be among them, for parameters
            that are in no module, such as master copies in float32.
        optimizer: of parameters of these models; or several.
        scheduler: a learning-rate scheduler, or a dict or list of several.
        more: the rest, under names of your choice: anything that may stand in a state.

    Raises:
        TypeError: a model or optimizer is none.
    """

    def __init__(self, model: Models, optimizer: Optimizers | None = None, scheduler: Any = None, **more: Any) -> None:
        named: list[tuple[str, nn.Module | Mapping[str, Tensor]]] = []
        super().__init__(model=_models(model, "", named))
        if optimizer is not None:
            self["optimizer"] = _optimizers(optimizer, named)
        if scheduler is not None:
            self["scheduler"] = scheduler
        self.update(more)


class ModelState(Stateful):
    """A module's weights, buffers and extra state, by clean names."""

    def __init__(self, module: nn.Module) -> None:
        self.module = unwrapped(module)

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.module)

    def fixed_state_keys(self, state: Any) -> Collection[Any] | None:
        """Weights must fit the model; its extra state comes as it was saved."""
        return weights_of(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:  # torch refuses to set nothing
            set_model_state_dict(self.module, dict(state_dict))


class OptimizerState(Stateful):
    """An optimizer's state by the names of its parameters. No moments are made for it.

    Args:
        models: with the prefixes of their names, in which the optimizer's parameters are.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, models: Sequence[tuple[str, nn.Module | Mapping[str, Tensor]]]
    ) -> None:
        self.optimizer, self._models = optimizer, models
        self._by_name: dict[Any, Tensor] = {}  # when it was last asked for its state

    def state_dict(self) -> dict[str, Any]:
        names = self._names()
        self._by_name = dict(zip(names, self._parameters(), strict=True))
        raw: dict[str, Any] = self.optimizer.state_dict()
        state = {names[key] if type(key) is int and key < len(names) else key: v for key, v in raw["state"].items()}
        return {
            **raw,
            "state": state,
            "param_groups": [_renamed(group, names.__getitem__) for group in raw["param_groups"]],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_optimizer(self.optimizer, self._numbered(state_dict))

    def check_state_dict(self, state: Any) -> None:
        """Refuses what the optimizer cannot take, before anything is loaded."""
        check_optimizer(self.optimizer, self._numbered(state))

    def make_state_tensor(self, missing: MissingTensor) -> Tensor | None:
        """A tensor that the optimizer would make in its first step."""
        name = missing.path[1] if len(missing.path) > 2 and missing.path[0] == "state" else None
        parameter = self._by_name.get(name)
        return None if parameter is None else like_parameter(parameter, missing)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _names(self) -> list[str]:
        """Of the parameters, in the order in which the optimizer numbers them."""
        known: dict[int, str] = {}
        for prefix, model in self._models:
            items = model.items() if isinstance(model, Mapping) else named_parameters(model)
            for name, parameter in items:
                known.setdefault(id(parameter), prefix + name)
        parameters = self._parameters()
        unknown = sum(id(parameter) not in known for parameter in parameters)
        if unknown:
            raise UnsupportedStateError(
                f"{unknown} of {len(parameters)} parameters of the {type(self.optimizer).__qualname__} are in no model "
                "of this TrainState: make the optimizer after what replaces parameters (as fully_shard does) "
                "and give all models, or a dict of tensors for parameters that are in none"
            )
        return [known[id(parameter)] for parameter in parameters]

    def _numbered(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state by names as the optimizer's own, which is by numbers."""
        number_of = {name: number for number, name in enumerate(self._names())}
        own = {number_of.get(name, name): each for name, each in state["state"].items()}
        groups = [_renamed(group, lambda name: number_of.get(name, name)) for group in state["param_groups"]]
        return {**state, "state": own, "param_groups": groups}


class _Fsdp1OptimizerState(OptimizerState):
    """FSDP1 has parts of flattened parameters in its optimizers; torch's own functions take them apart."""

    def __init__(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        super().__init__(optimizer, [("", module)])
        self._module = module
        self._weights: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        if self.optimizer.state:
            return get_optimizer_state_dict(self._module, self.optimizer)
        self._weights = get_model_state_dict(
            self._module
        )  # talks to the other ranks, which `make_state_tensor` must not
        return {"state": {}, "param_groups": self._groups()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not state_dict["state"]:  # torch takes only what an optimizer has after a step
            self.optimizer.state.clear()
            for group, saved in zip(self.optimizer.param_groups, state_dict["param_groups"], strict=True):
                group.update(_renamed(saved, lambda _: None) | {"params": group["params"]})
            return
        before = [dict(group) for group in self.optimizer.param_groups]
        set_optimizer_state_dict(self._module, self.optimizer, state_dict)
        for group, own in zip(self.optimizer.param_groups, before, strict=True):
            for key, value in own.items():  # torch drops the options of a group of which this rank has no parameters
                group.setdefault(key, value)

    def check_state_dict(self, state: Any) -> None:
        """Refuses another number of groups; what else fits is known to torch alone."""
        saved, own = len(state["param_groups"]), len(self.optimizer.param_groups)
        if saved != own:
            raise TargetError(
                f"the {type(self.optimizer).__qualname__} has {own} parameter groups, the checkpoint {saved}: make it "
                "with the groups that were saved"
            )

    def make_state_tensor(self, missing: MissingTensor) -> Tensor | None:
        weight = self._weights.get(missing.path[1]) if len(missing.path) > 2 else None
        return None if weight is None else like_parameter(weight, missing)

    def _groups(self) -> list[dict[str, Any]]:
        """The groups by names; a flattened parameter has those of all that it was made of."""
        names: dict[int, list[str]] = {}
        for name, parameter in named_parameters(self._module):
            prefix, flat, _ = name.rpartition("_flat_param")
            own = [prefix + each for each in parameter._fqns] if flat else [name]  # type: ignore[attr-defined]
            names.setdefault(id(parameter), own)
        return [
            _renamed(group, lambda each: each)
            | {"params": [name for parameter in group["params"] for name in names[id(parameter)]]}
            for group in self.optimizer.param_groups
        ]


def _models(model: Any, prefix: str, named: list[tuple[str, nn.Module | Mapping[str, Tensor]]]) -> Any:
    """What stands in the state for one model or several; `named` gets each with the prefix of its names."""
    if isinstance(model, nn.Module):
        state = ModelState(model)
        named.append((prefix, state.module))
        return state
    if isinstance(model, Mapping) and model and all(isinstance(each, Tensor) for each in model.values()):
        named.append((prefix, model))
        return dict(model)
    if isinstance(model, Mapping):
        return {key: _models(each, f"{prefix}{key}.", named) for key, each in model.items()}
    if isinstance(model, list | tuple):
        return [_models(each, f"{prefix}{number}.", named) for number, each in enumerate(model)]
    raise TypeError(f"a model is a Module, a dict of tensors, or several of these, not a {type(model).__qualname__}")


def _optimizers(optimizer: Any, named: Sequence[tuple[str, nn.Module | Mapping[str, Tensor]]]) -> Any:
    if isinstance(optimizer, Mapping):
        return {key: _optimizers(each, named) for key, each in optimizer.items()}
    if isinstance(optimizer, list | tuple):
        return [_optimizers(each, named) for each in optimizer]
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"an optimizer is a torch.optim.Optimizer, not a {type(optimizer).__qualname__}")
    sharded = [model for _, model in named if isinstance(model, nn.Module) and _is_fsdp1(model)]
    if not sharded:
        return OptimizerState(optimizer, named)
    if len(named) > 1:
        raise TypeError("with FSDP1 a TrainState has one model: take the others' states from torch's get_state_dict")
    return _Fsdp1OptimizerState(optimizer, sharded[0])


def _is_fsdp1(module: nn.Module) -> bool:
    return any(isinstance(each, FullyShardedDataParallel) for each in module.modules())


def _renamed(group: Mapping[str, Any], name_of: Callable[[Any], Any]) -> dict[str, Any]:
    """A group whose parameters are called otherwise. torch's own list of their names is left out."""
    kept = {key: value for key, value in group.items() if key != "param_names"}
    return {**kept, "params": [name_of(each) for each in group["params"]]}
