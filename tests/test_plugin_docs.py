"""What docs/plugins.md quotes is in the files that it names, word for word."""

import re
from pathlib import Path

import pytest
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "plugins.md"
# A line that names the file and nothing else, then the block.
QUOTED = re.compile(r"^`(?P<file>[^`\n]+)`:\n\n```(?P<language>py|toml)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
TEXT = PAGE.read_text(encoding="utf-8")
QUOTES = list(QUOTED.finditer(TEXT))


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: Path(quote["file"]).name)
def test_a_quoted_block_is_an_excerpt(quote: re.Match[str]) -> None:
    source = (ROOT / quote["file"]).read_text(encoding="utf-8")
    assert f"\n{quote['text']}" in f"\n{source}", f"{quote['file']} has changed: quote it anew in {PAGE.name}"


def test_every_block_is_quoted_or_run() -> None:
    """`python` blocks are run by test_docs, `py` and `toml` blocks are quotes, `sh` blocks are neither."""
    languages = re.findall(r"^```(\S*)$", TEXT, re.MULTILINE)[::2]
    assert set(languages) <= {"python", "py", "toml", "sh"}
    assert len(QUOTES) == languages.count("py") + languages.count("toml") > 5
    run = list(Document.parse(str(PAGE), PythonCodeBlockParser()).examples())
    assert len(run) == languages.count("python") > 0


def test_every_file_that_is_named_exists() -> None:
    for name in re.findall(r"`((?:plugins|platforms|hyper_ckpt|tests)/[\w/.]+)`", TEXT):
        assert (ROOT / name).exists(), name
