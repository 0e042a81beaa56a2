"""The entry module of the plugin: says what there is and imports MindSpore only when it is used."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from hyper_ckpt.contracts.codec import Codec
from hyper_ckpt.contracts.platform import Platform, PlatformSpec
from hyper_ckpt.errors import PlatformError
from hyper_ckpt.hookspecs import CodecSpec, hookimpl

CONTRACT_VERSION = 1


def active() -> int:
    """World size of MindSpore's world group; 0 while there is none."""
    distributed = sys.modules.get("mindspore.mint.distributed")
    if distributed is None or not distributed.is_initialized():
        return 0
    return int(distributed.get_world_size())


def load() -> Platform:
    """The platform of MindSpore's world group.

    Raises:
        PlatformError: numpy is too new for MindSpore.
    """
    check_numpy(np.__version__)
    from hyper_ckpt_mindspore.platform import default

    return default()


def check_numpy(version: str) -> None:
    """Refuses numpy 2, beside which MindSpore's first operation fails and bfloat16 cannot be read.

    Raises:
        PlatformError: says what to install.
    """
    if int(version.partition(".")[0]) >= 2:
        raise PlatformError(f"MindSpore does not work beside numpy {version}. Run: pip install 'numpy>=1.25,<2'")


def codecs() -> Sequence[Codec]:
    """Codecs for MindSpore's own types."""
    from hyper_ckpt_mindspore.codecs import CODECS

    return CODECS


# DTensors of hyper-parallel derive from MindSpore's Tensor, so its module needs no naming; those that it makes for
# torch must not count here.
@hookimpl
def hyper_ckpt_platforms() -> list[PlatformSpec]:
    return [
        PlatformSpec(
            "mindspore",
            ("mindspore",),
            active,
            load,
            "pip install 'hyper-ckpt[mindspore]'",
            "hyper_ckpt_mindspore.probe:Probe",
        )
    ]


@hookimpl
def hyper_ckpt_codecs() -> list[CodecSpec]:
    return [CodecSpec(("mindspore",), codecs)]
