"""The suites that every platform and every store must pass; see docs/plugins.md.

`PlatformSuite` and `StoreSuite` need pytest and are imported when they are used; `hyper-ckpt conformance` runs the same
checks without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_ckpt.testing.conformance.probe import PlatformProbe

if TYPE_CHECKING:
    from hyper_ckpt.testing.conformance.suites import PlatformSuite, StoreSuite

__all__ = ["PlatformProbe", "PlatformSuite", "StoreSuite"]


def __getattr__(name: str) -> Any:
    if name not in ("PlatformSuite", "StoreSuite"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hyper_ckpt.testing.conformance import suites

    return getattr(suites, name)
