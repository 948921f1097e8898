"""Hooks of MkDocs: links to files of the repository, roles of Sphinx, and tables of the commands' options.

Pages link to benchmarks, scripts and tests by their paths in the repository, such as `../benchmarks/x.md` in `docs/`.
In the site each linked file becomes a page at its path in the repository.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from cnnstrategies.commands.arguments.command import Command
from cnnstrategies.commands.arguments.options import COMMANDS, PROGRAMS

LINK = re.compile(r"(\]\()([^)#\s:]+)(?=[)#])")
ROLE = re.compile(r":(?:class|meth|mod|func|attr|exc):<code>(?:~[\w.]*\.)?([\w.]+)</code>")
OPTIONS = re.compile(r"^<!-- options of (\S+) -->$", re.MULTILINE)
OTHER_COMMANDS = "<!-- other commands -->"
SHOWN_AS = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".txt": "text", "": "make"}
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

# By the URI of a page that these hooks make: the file in the repository.
made: dict[str, Path] = {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository that pages link to."""
    made.clear()
    waiting = [DOCS / file.src_uri for file in files.documentation_pages()]
    while waiting:
        path = waiting.pop()
        for _, target in LINK.findall(path.read_text(encoding="utf-8")):
            named = (path.parent / target).resolve()
            if not named.is_file() or not named.is_relative_to(ROOT) or files.get_file_from_path(_uri(named)):
                continue
            if named.suffix == ".md" or named.suffix in SHOWN_AS:
                files.append(File.generated(config, _uri(named), content=_page(named)))
                made[_uri(named)] = named
            else:
                files.append(File.generated(config, _uri(named), abs_src_path=str(named)))
            if named.suffix == ".md":
                waiting.append(named)
                script = named.with_suffix(".py")
                if script.is_file() and not files.get_file_from_path(_uri(script)):
                    files.append(File.generated(config, _uri(script), content=_page(script)))
                    made[_uri(script)] = script
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change links so that they lead to the added pages, and insert the tables of the commands' options."""
    markdown = with_options(markdown)
    here = made.get(page.file.src_uri, DOCS / page.file.src_uri)
    if here.suffix != ".md":
        return markdown

    def lead(link: re.Match[str]) -> str:
        named = (here.parent / link[2]).resolve()
        if not named.is_file() or files.get_file_from_path(_uri(named)) is None:
            return link[0]
        return link[1] + posixpath.relpath(_uri(named), posixpath.dirname(page.file.src_uri))

    return LINK.sub(lead, markdown)


def with_options(markdown: str) -> str:
    """Return a page with a table of options in place of each mark ``<!-- options of NAME -->``.

    The mark ``<!-- other commands -->`` is replaced by a section for each command that no other mark names.
    """
    commands = {**COMMANDS, **PROGRAMS}
    others = [command for name, command in COMMANDS.items() if name not in OPTIONS.findall(markdown)]
    sections = (f"## {command.name}\n\n{command.description}\n\n{_options(command)}" for command in others)
    markdown = OPTIONS.sub(lambda mark: _options(commands[mark[1]]), markdown)
    return markdown.replace(OTHER_COMMANDS, "\n\n".join(sections))


def _options(command: Command) -> str:
    rows = [*(option.row for option in command.options), *command.keys]
    cells = ((f"`{name}`".replace("|", "\\|"), text.removesuffix(".").replace("|", "\\|")) for name, text in rows)
    lines = (f"| {name} | {text} |" for name, text in cells)
    return "\n".join(["| Option | Meaning |", "| --- | --- |", *lines])


def on_page_content(html: str, **_: object) -> str:
    """Replace Sphinx's roles, which docstrings contain, by plain code."""
    return ROLE.sub(r"<code>\1</code>", html)


def _uri(path: Path) -> str:
    """Return the URI in the site for a file of the repository."""
    relative = path.relative_to(DOCS if path.suffix not in SHOWN_AS and path.is_relative_to(DOCS) else ROOT)
    return relative.as_posix() + (".md" if path.suffix in SHOWN_AS else "")


def _page(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        script = path.with_suffix(".py").name
        return text + (f"\nThe script: [{script}]({script})\n" if path.with_suffix(".py").is_file() else "")
    name = path.relative_to(ROOT).as_posix()
    # Without navigation and contents the page is wide enough for lines of 120 characters.
    front = "---\nsearch: {exclude: true}\nhide: [navigation, toc]\n---\n"
    return f"{front}# {name}\n\n~~~~~~{SHOWN_AS[path.suffix]}\n{text}\n~~~~~~\n"
