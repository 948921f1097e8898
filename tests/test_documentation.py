"""The documentation's check finds faults, and the charts show the numbers on the pages of the benchmarks."""

import ast
import functools
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "docs"))
from check_site import faults

PROSE_LIMIT = 24_000  # Words of prose on the pages for users; longer pages are read by fewer people.
OWN_MESSAGES = ("Data", "Memory and waiting", "Pipelines", "Parameter servers")  # Sections with the package's messages.

GOOD = '<title>A</title><p id="here">x</p><a href="#here">y</a><a href="sub/">z</a><img src="p.png">'


def test_raw_marks_broken_links_and_missing_pictures_are_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "p.png").touch()
    (tmp_path / "index.html").write_text(GOOD)
    (tmp_path / "sub/index.html").write_text('<title>B</title><a href="../index.html#here">up</a>')
    assert faults(tmp_path) == []
    bad = '<code>--8 &lt; --"a.py"</code><a href="nowhere/">n</a><a href="../#there">t</a><img src="q.png">'
    (tmp_path / "sub/index.html").write_text(bad)
    assert [fault.partition(": ")[2] for fault in faults(tmp_path)] == [
        "raw mark '--8 <'",
        "no title",
        "nowhere/ leads nowhere",
        "../#there names no part of that page",
        "q.png leads nowhere",
    ]


@pytest.mark.light
def test_the_front_pages_charts_have_the_measured_numbers() -> None:
    measured = list(runpy.run_path(str(ROOT / "docs/images/front.py"))["measured"]())
    assert len(measured) > 5
    for picture in ("results.svg", "results_narrow.svg"):
        shown = re.findall(r">([^<>]+)</text>", (ROOT / "docs/images" / picture).read_text())
        for name, value in measured:
            assert name in shown
            assert f"{value:.3g}" in shown


def prose_words(page: str) -> int:
    """Return the number of a page's words outside of code blocks and tables."""
    lines = re.sub(r"```.*?```", "", page, flags=re.DOTALL).splitlines()
    return sum(len(line.split()) for line in lines if not line.lstrip().startswith("|"))


@pytest.mark.light
def test_the_pages_for_users_stay_short() -> None:
    assert prose_words("One *two*.\n\n```bash\nnot counted\n```\n| not | counted |\n- three") == 4
    pages = [path for folder in ("docs", "docs/reference") for path in (ROOT / folder).glob("*.md")]
    words = {path.name: prose_words(path.read_text()) for path in pages}
    longest = sorted(words, key=words.__getitem__)[-5:]
    assert sum(words.values()) <= PROSE_LIMIT, f"shorten a page, such as {', '.join(reversed(longest))}"


def texts(node: ast.AST) -> str:
    """Return the text of a string in a program, with a space for each value that is formatted into it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else " " for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@functools.cache
def messages_of(source: str) -> list[str]:
    """Return the texts in the source of a module."""
    return [text for node in ast.walk(ast.parse(source)) if (text := texts(node))]


@pytest.mark.light
def test_the_package_has_the_messages_that_the_documentation_explains() -> None:
    sources = [path.read_text() for path in (ROOT / "cnnstrategies").rglob("*.py")]
    sections = re.split(r"^## (.*)$", (ROOT / "docs/troubleshooting.md").read_text(), flags=re.MULTILINE)
    page = dict(zip(sections[1::2], sections[2::2], strict=True))
    explained = [
        quoted
        for name in OWN_MESSAGES
        for row in re.findall(r"^\| (`.*?) \|", page[name], re.MULTILINE)
        for quoted in re.findall("`(.*?)`", row)
    ]
    assert len(explained) > 15
    for quoted in explained:
        pattern = ".*".join(re.escape(part.strip()) for part in quoted.split("…"))
        # To parse all files takes 2 s. A message may be divided among lines of its source, but not within a word.
        words = re.findall(r"\w{4,}", quoted)
        candidates = [source for source in sources if all(word in source for word in words)]
        messages = (message for source in candidates for message in messages_of(source))
        assert any(re.search(pattern, message, re.DOTALL) for message in messages), quoted
