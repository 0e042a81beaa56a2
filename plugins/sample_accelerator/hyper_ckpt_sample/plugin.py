"""The entry module of the plugin: says what there is. Imports the framework only when it is used."""

from __future__ import annotations

import sys

from hyper_ckpt.contracts.platform import Platform, PlatformSpec
from hyper_ckpt.hookspecs import hookimpl

CONTRACT_VERSION = 1


def active() -> int:
    """World size of the framework's process group; 0 while there is none."""
    framework = sys.modules.get("hyper_ckpt_sample.framework")
    group = framework.process_group() if framework is not None else None
    return 0 if group is None else int(group.world_size)


def load() -> Platform:
    """The platform of the framework's process group."""
    from hyper_ckpt_sample.platform import default

    return default()


@hookimpl
def hyper_ckpt_platforms() -> list[PlatformSpec]:
    return [
        PlatformSpec(
            name="sample",
            modules=("hyper_ckpt_sample",),
            active=active,
            load=load,
            install="pip install hyper-ckpt-sample-accelerator",
            probe="hyper_ckpt_sample.probe:Probe",
        )
    ]
