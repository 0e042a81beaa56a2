"""The entry module of the plugin: says what there is and imports torch only when it is used."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hyper_ckpt.contracts.codec import Codec
from hyper_ckpt.contracts.platform import Platform, PlatformSpec
from hyper_ckpt.hookspecs import CodecSpec, hookimpl

CONTRACT_VERSION = 1


def active() -> int:
    """World size of torch's default process group; 0 while there is none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0
    return int(distributed.get_world_size())


def load() -> Platform:
    """The platform of torch's default process group."""
    from hyper_ckpt_torch.platform import default

    return default()


def codecs() -> Sequence[Codec]:
    """Codecs for torch's own types."""
    from hyper_ckpt_torch.codecs import CODECS

    return CODECS


@hookimpl
def hyper_ckpt_platforms() -> list[PlatformSpec]:
    install, probe = "pip install 'hyper-ckpt[torch]'", "hyper_ckpt_torch.probe:TorchProbe"
    return [PlatformSpec("torch", ("torch", "torch_npu"), active, load, install, probe)]


@hookimpl
def hyper_ckpt_codecs() -> list[CodecSpec]:
    return [CodecSpec(("torch",), codecs)]
