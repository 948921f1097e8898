"""Check the built site for faults that `mkdocs build --strict` does not find: `python docs/check_site.py site`.

The faults are raw marks of Markdown extensions, links and pictures without a target, and pages without a title.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Marks of snippets, mkdocstrings, admonitions, tabs, attribute lists and Sphinx's roles. They are searched in the text
# that a reader sees, including code.
RAW_MARKS = (r"-+ ?8 ?<", r"^:::", r"^!!! ", r"^=== \"", r"\{: ?[#.]", r"\$\{\{", r":(?:class|meth|mod|func|attr|exc):")


class Page(HTMLParser):
    """The visible text, the title, the links and the anchors of a page.

    Args:
        html: Source of the page.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.title = ""
        self._hidden = 0
        self._in_title = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self._hidden += tag in ("script", "style")
        self._in_title = tag == "title"
        for name in ("href", "src", "srcset"):
            if values.get(name):
                self.targets.append(str(values[name]))
        for name in ("id", "name"):
            if values.get(name):
                self.anchors.add(str(values[name]))

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style")
        self._in_title = False

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data
        if not self._hidden:
            self.text.append(data)


def faults(site: Path) -> list[str]:
    """Return the faults of a site, with one line for each."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    lines = []
    for path, page in pages.items():
        name = path.relative_to(site)
        text = "".join(page.text)
        if not path.parent.suffix:  # The page of a script shows the script's source, which may contain marks.
            lines += [f"{name}: raw mark {m[0]!r}" for mark in RAW_MARKS for m in re.finditer(mark, text, re.MULTILINE)]
        if not page.title.strip():
            lines.append(f"{name}: no title")
        if path.name == "404.html":
            continue  # The page's links start at the site's root, whose address is not known here.
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = place / "index.html" if place.is_dir() else place
            if not place.exists():
                lines.append(f"{name}: {target} leads nowhere")
            elif parts.fragment and place in pages and unquote(parts.fragment) not in pages[place].anchors:
                lines.append(f"{name}: {target} names no part of that page")
    return lines


if __name__ == "__main__":
    site = Path(sys.argv[1]).resolve()
    report = faults(site)
    print("\n".join(report) or f"{len(list(site.rglob('*.html')))} pages, no raw mark, broken link or missing picture")
    sys.exit(bool(report))
