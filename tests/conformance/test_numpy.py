"""The built-in platform keeps every promise, on a world of threads."""

from hyper_ckpt.testing.conformance import PlatformSuite


class TestNumpy(PlatformSuite):
    probe = "hyper_ckpt.testing.conformance.numpy_probe:NumpyProbe"
