"""Every ```python block of the README and the docs runs: per file in order, in one namespace and an empty folder."""

from pathlib import Path

import pytest
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


# Lightning's advice on speed, and what it uses of torch that torch is going to drop.
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for example in Document.parse(str(page), PythonCodeBlockParser(), SkipParser()).examples():
        example.evaluate()
