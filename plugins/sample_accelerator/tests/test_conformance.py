"""The suite that every platform must pass."""

from hyper_ckpt.testing.conformance import PlatformSuite


class TestSample(PlatformSuite):
    probe = "hyper_ckpt_sample.probe:Probe"
