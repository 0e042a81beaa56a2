import os

import pytest
from hypothesis import settings

# No deadline per example: a shared machine is slow at times, and pytest-timeout bounds the test.
settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own HYPER_CKPT_* variables must not decide how a test goes."""
    for name in [name for name in os.environ if name.startswith("HYPER_CKPT_")]:
        monkeypatch.delenv(name)
