"""torch keeps every promise, on a world of gloo processes."""

from hyper_ckpt.testing.conformance import PlatformSuite


class TestTorch(PlatformSuite):
    probe = "hyper_ckpt_torch.probe:TorchProbe"
