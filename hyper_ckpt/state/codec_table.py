"""Codecs looked up by type and by name, their failures put into the library's words."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from hyper_ckpt.contracts.codec import Codec
from hyper_ckpt.errors import ManifestError, PluginError, UnsupportedStateError, UnsupportedTypeError
from hyper_ckpt.state.names import shown
from hyper_ckpt.state.tree import CodecNode, PickleNode


def _framework(kind: type) -> str | None:
    """The framework with a platform of ours that a class comes from."""
    module = kind.__module__.partition(".")[0]
    return {"torch": "torch", "torch_npu": "torch", "mindspore": "mindspore"}.get(module)


class CodecTable:
    """The codecs of one save or load.

    Raises:
        PluginError: two codecs have one name, or two claim one type.
    """

    def __init__(self, codecs: Sequence[Codec], *, allow_pickle: bool) -> None:
        self._by_name: dict[str, Codec] = {}
        self._by_type: dict[type, Codec] = {}
        self._allow_pickle = allow_pickle
        for codec in codecs:
            if self._by_name.setdefault(codec.name, codec) is not codec:
                raise PluginError(f"two codecs are called {codec.name!r}: rename one of them")
            if self._by_type.setdefault(codec.type, codec) is not codec:
                raise PluginError(f"codecs {self._by_type[codec.type].name!r} and {codec.name!r} store the same type")

    def without_pickle(self) -> CodecTable:
        """The same codecs, where pickling is not allowed."""
        return CodecTable([*self._by_name.values()], allow_pickle=False)

    def find(self, cls: type) -> Codec | None:
        """The codec of exactly this type, else that of the nearest base whose codec takes subclasses."""
        for base in cls.__mro__:
            codec = self._by_type.get(base)
            if codec is not None and (base is cls or codec.subclasses):
                return codec
        return None

    def encode(self, codec: Codec, value: Any, name: str | None) -> CodecNode:
        """Raises UnsupportedStateError (of the codec's own kind, if it raised one) with the value's name."""
        try:
            data = codec.encode(value)
        except UnsupportedStateError as error:
            raise type(error)(f"{shown(name)}: {error}") from error
        except Exception as error:
            raise UnsupportedStateError(f"{shown(name)}: codec {codec.name!r} failed: {error!r}") from error
        if type(data) is not bytes:
            raise PluginError(f"codec {codec.name!r} made {type(data).__name__} of {shown(name)} instead of bytes")
        return CodecNode(codec.name, data)

    def decode(self, node: CodecNode, name: str | None) -> Any:
        """Raises ManifestError if the bytes are bad, UnsupportedTypeError if there is no such codec."""
        codec = self._by_name.get(node.name)
        if codec is None:
            raise UnsupportedTypeError(
                f"{shown(name)} was saved with codec {node.name!r:.100}, which is not registered: "
                "install the package that brings it, or pass the codec"
            )
        try:
            return codec.decode(node.v)
        except (UnsupportedStateError, ManifestError) as error:
            raise type(error)(f"{shown(name)}: {error}") from error
        except Exception as error:
            raise ManifestError(f"{shown(name)}: codec {codec.name!r} cannot read its bytes: {error!r}") from error

    def assign_of(self, node: CodecNode) -> Callable[[Any, Any], None] | None:
        """How a value of this codec is set in place, None if it can't be."""
        codec = self._by_name.get(node.name)
        return None if codec is None else codec.assign

    def pickle(self, value: Any, name: str | None) -> PickleNode:
        """Raises UnsupportedTypeError with the remedies unless pickling is allowed."""
        if not self._allow_pickle:
            cls = f"{type(value).__module__}.{type(value).__qualname__}"
            framework = next((f for base in type(value).__mro__ if (f := _framework(base))), None)
            if framework is not None:
                raise UnsupportedTypeError(
                    f"{shown(name)} is of type {cls}, which the platform of this call does not know. If it is a "
                    f"tensor, pass platform={framework!r}, or install hyper-ckpt-{framework}, or see `hyper-ckpt "
                    "plugins` for why it is not used; else convert it to plain values, or register a codec"
                )
            raise UnsupportedTypeError(
                f"{shown(name)} is of type {cls}, which cannot be stored. Register a codec for it, give it state_dict "
                "and load_state_dict, convert it to plain values, or pickle it: SaveOptions(allow_pickle=True) when "
                "saving, LoadOptions(allow_pickle=True) when loading"
            )
        try:
            return PickleNode(pickle.dumps(value))
        except Exception as error:
            raise UnsupportedStateError(f"{shown(name)} cannot be pickled: {error!r}") from error

    def unpickle(self, node: PickleNode, name: str | None) -> Any:
        """Raises UnsupportedTypeError unless unpickling is allowed."""
        if not self._allow_pickle:
            raise UnsupportedTypeError(
                f"{shown(name)} was saved with allow_pickle=True: loading it runs code that the checkpoint brings. "
                "If you trust the checkpoint, pass options=LoadOptions(allow_pickle=True)"
            )
        try:
            return pickle.loads(node.v)
        except Exception as error:
            raise ManifestError(f"{shown(name)} cannot be unpickled: {error!r}") from error
