"""The suite that every platform must pass."""

from hyper_ckpt.testing.conformance.suites import PlatformSuite


class TestMindSpore(PlatformSuite):
    probe = "hyper_ckpt_mindspore.probe:Probe"
