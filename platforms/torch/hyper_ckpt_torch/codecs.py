"""Values of torch that are neither tensors nor plain Python values."""

from __future__ import annotations

import json

import numpy as np
import torch

from hyper_ckpt.contracts.codec import Codec

# All that this release has. Never getattr(torch, name): for names like "_dynamo" or "onnx" torch imports a module.
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def _encode_size(value: torch.Size) -> bytes:
    return json.dumps([int(length) for length in value]).encode()


def _decode_size(data: bytes) -> torch.Size:
    lengths = json.loads(data)
    if not isinstance(lengths, list) or not all(type(length) is int for length in lengths):
        raise ValueError(f"not a torch.Size: {data[:80]!r}")
    return torch.Size(lengths)


def _encode_dtype(value: torch.dtype) -> bytes:
    return str(value).removeprefix("torch.").encode()


def _decode_dtype(data: bytes) -> torch.dtype:
    found = _DTYPES.get(data.decode("ascii"))
    if found is None:
        raise ValueError(f"torch {torch.__version__} has no dtype {data[:80]!r}")
    return found


def _encode_device(value: torch.device) -> bytes:
    return str(value).encode()


def _decode_device(data: bytes) -> torch.device:
    return torch.device(data.decode("ascii"))


def _encode_generator(value: torch.Generator) -> bytes:
    return str(value.device).encode() + b"\0" + value.get_state().numpy().tobytes()


def _decode_generator(data: bytes) -> torch.Generator:
    device, _, state = data.partition(b"\0")
    generator = torch.Generator(_decode_device(device))
    # A state of the wrong size is refused by set_state.
    generator.set_state(torch.from_numpy(np.frombuffer(state, np.uint8).copy()))
    return generator


def _assign_generator(target: torch.Generator, loaded: torch.Generator) -> None:
    target.set_state(loaded.get_state())


CODECS = (
    Codec("torch.Size", torch.Size, _encode_size, _decode_size),
    Codec("torch.dtype", torch.dtype, _encode_dtype, _decode_dtype),
    Codec("torch.device", torch.device, _encode_device, _decode_device),
    Codec("torch.Generator", torch.Generator, _encode_generator, _decode_generator, assign=_assign_generator),
)
