"""The suite that every platform must pass."""

from hyper_ckpt.testing.conformance.suites import PlatformSuite


class TestMindSpore(PlatformSuite):
    probe = "hyper_ckpt_mindspore.probe:Probe"
    without = {  # noqa: RUF012 - the suite declares it
        "collectives_fail_in_time": "on the CPU MindSpore gives up after 30 s, which nothing changes"
    }
