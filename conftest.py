import pytest

from hyper_ckpt.testing.time_scale import TIME_SCALE, scaled

LIMIT = 60.0  # as in pyproject.toml


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a machine that is declared busy, no test is called hung before its time."""
    if TIME_SCALE == 1:
        return
    for item in items:
        marker = item.get_closest_marker("timeout")
        if not any(item.get_closest_marker(name) for name in ("bench", "soak")):
            item.add_marker(pytest.mark.timeout(scaled(marker.args[0] if marker else LIMIT)), append=False)
