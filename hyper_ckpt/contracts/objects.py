"""How objects with state_dict and load_state_dict take a saved state. A platform may know more of some of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

Form = Literal["sharded", "replicated", "array"]
"""How a tensor in an object's state lay when it was saved: in parts over ranks, whole but described by a mesh of ranks,
or as a numpy array. None, where this may stand: whole, as a tensor of the framework."""


@dataclass(frozen=True)
class MissingTensor:
    """A tensor of an object's saved state that the object does not have, or has with another shape or dtype.

    Args:
        path: the keys (of lists: the positions) that lead to it from the object's state: ("state", 0, "exp_avg").
        dtype: a name of `hyper_ckpt.dtypes`.
        shape: the global shape.
        form: how it lay when it was saved.
    """

    path: tuple[Any, ...]
    dtype: str
    shape: tuple[int, ...]
    form: Form | None


class Objects:
    """What a load asks of the objects in a state. As it is, it fits any object.

    An object is handed its whole saved state. Tensors that it has under a saved name, with the saved shape and dtype,
    are filled where they lie and handed back to it; the others are made by `make`. All methods but `load` run before
    anything has changed, and none may talk to other ranks but `load`, which does if `load_state_dict` does.
    """

    def fixed(self, owner: Any, state: Any) -> Collection[Any] | None:
        """The keys of `state`, what `owner.state_dict()` gave, at which a checkpoint must fit the object as it is, like
        the weights of a network: names, kinds, shapes and dtypes are compared, as in a plain dict, and the tensors
        filled. At its other keys the object takes what was saved. None: it takes all of it as it was saved. As it is,
        an object answers for itself by a method `fixed_state_keys(state)`, if it has one; else None.
        """
        own = getattr(type(owner), "fixed_state_keys", None)
        return None if own is None else own(owner, state)

    def make(self, owner: Any, missing: MissingTensor) -> Any:
        """A new tensor of the saved global shape and dtype, of any contents, on the device and in the distribution that
        the object needs: it is filled and handed to the object.

        None: unknown. Then a new tensor that is whole is made beside the object's others, and a sharded one is refused.
        As it is, an object answers for itself by a method `make_state_tensor(missing)`, if it has one.
        """
        own = getattr(type(owner), "make_state_tensor", None)
        return None if own is None else own(owner, missing)

    def check(self, owner: Any, state: Any) -> None:
        """Refuses a state that `load_state_dict` would refuse, or take and be wrong. `state` is what it will be handed;
        tensors have their shapes and dtypes, but no contents yet. Inherited: the object's own method
        `check_state_dict(state)` is called, if it has one.

        Raises:
            TargetError: the object cannot take it; says what to do.
        """
        own = getattr(type(owner), "check_state_dict", None)
        if own is not None:
            own(owner, state)

    def load(self, owner: Any, state: Any) -> None:
        """Hands the state to the object, by load_state_dict; may undo what that changes of it, such as dtypes."""
        owner.load_state_dict(state)
