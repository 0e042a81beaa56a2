"""Lists the plugins of this environment."""

from __future__ import annotations

from collections.abc import Iterator

from hyper_ckpt.cli import text
from hyper_ckpt.registry import PluginInfo
from hyper_ckpt.text import clean


def as_text(plugins: list[PluginInfo]) -> Iterator[str]:
    """A paragraph for each plugin: its distribution, what it announces, and ready or why not."""
    for plugin in plugins:
        origin = " ".join(filter(None, [plugin.distribution, plugin.version]))
        yield clean(f"{plugin.name}  ({origin})" if origin else plugin.name)
        for each in plugin.announces:
            yield clean(f"  {each}")
        yield text.paragraph("ready" if plugin.error is None else plugin.error, "  ")
