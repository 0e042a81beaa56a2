"""The suites that every platform and every store must pass; see docs/plugins.md."""

from __future__ import annotations

from hyper_ckpt.testing.conformance.probe import PlatformProbe

__all__ = ["PlatformProbe"]
