"""Check docstrings, comments, messages and names against the mechanical part of docs/development/words.md.

In the package also check that a strategy is asked through `cnnstrategies.strategies.protocol.facts_of` only.

    python docs/development/check_words.py                   check the folders that `make lint` checks
    python docs/development/check_words.py cnnstrategies/data     check one folder or file, exceptions included
    python docs/development/check_words.py --shrink          remove exceptions that are not needed any more

`words_exceptions.txt` beside this script lists the files and folders that may have faults. The list only shrinks: an
entry without faults is itself an error, and `--shrink` removes it.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CHECKED = ("cnnstrategies", "tests", "benchmarks", "docs")
PACKAGE = "cnnstrategies"  # Here each class name may be used once.
EXCEPTIONS = Path(__file__).with_name("words_exceptions.txt")

FIRST_WORD = re.compile(r"(Of|Whose|Who|What|Beside|That|Those|These|By|In whose|In which|As|It|They|He)\b")
IS_NO = re.compile(r"(?<!here )\b(?:is|are|was|were) no\b(?! longer\b| more than\b)")
NAMES = {
    "one", "own", "found", "said", "told", "given", "had", "came", "met", "those", "it", "what", "who", "which",
    "whose", "they",
}  # fmt: skip

# Calls whose texts a user reads, beside exceptions: every call of a class named ...Error counts as well.
MESSAGE_CALLS = {
    "rank_zero_info", "rank_zero_warn", "rank_zero_debug", "warn", "warning", "info", "debug", "error", "critical",
    "log", "print", "add_note", "note", "progress", "End", "RunEnded", "Say", "Reason", "_say", "_refuse", "_end",
    "_finish",
}  # fmt: skip
MESSAGE_KEYWORDS = {"help", "description", "epilog"}

INTERFACE = Path(PACKAGE, "strategies", "protocol.py")  # The one file that looks at classes of strategies.
QUESTIONS = {"getattr", "hasattr", "isinstance", "issubclass"}
IN_CONFIGURATIONS = {"str", "dict", "'init_args'"}


class Fault(NamedTuple):
    """One place that breaks a rule."""

    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {' '.join(self.text.split())[:110]}"


class Comment(NamedTuple):
    """A comment behind code, or the lines of a comment that stand directly below each other, joined.

    Attributes:
        line: Number of its first line.
        end: Number of its last line.
        text: Its text without the marks.
        trails: Whether code precedes it on its line.
    """

    line: int
    end: int
    text: str
    trails: bool


def docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.Constant]]:
    """Yield each docstring and the module, class or function that it belongs to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and ast.get_docstring(node):
                yield node, first.value


def comments(source: str) -> list[Comment]:
    """Return the comments of a file, in order."""
    joined: list[Comment] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, text = token.start[0], token.string.lstrip("#!: ")
        trails = bool(token.line[: token.start[1]].strip())
        if joined and not trails and not joined[-1].trails and joined[-1].end == line - 1:
            joined[-1] = joined[-1]._replace(end=line, text=f"{joined[-1].text} {text}")
        else:
            joined.append(Comment(line, line, text, trails))
    return joined


def messages(tree: ast.Module) -> Iterator[ast.stmt | ast.expr]:
    """Yield the raise statements, the calls and the keywords' values whose texts a user reads; none inside another."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _is_message(node)):
            if any(" " in text.value for text in literals(node)):
                yield node
            continue
        if isinstance(node, ast.keyword) and node.arg in MESSAGE_KEYWORDS and any(literals(node)):
            yield node.value
            continue
        waiting += ast.iter_child_nodes(node)


def _is_message(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in MESSAGE_CALLS or name.endswith("Error")


def literals(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the texts inside an expression or statement, each constant part of an f-string by itself."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable, parameter and attribute of self that is set."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield node.lineno, name.lstrip("_")
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield getattr(node, "lineno", 0), name


def faults_of(path: Path) -> Iterator[Fault]:
    """Yield the faults of one file, except class names that other files use as well."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    for _, constant in docstrings(tree):
        text = ast.literal_eval(constant).strip()
        if match := FIRST_WORD.match(text):
            yield Fault(path, constant.lineno, f'docstring begins with "{match[1]}"', text.split("\n")[0])
        yield from _is_no(path, constant.lineno, text)
    for comment in comments(source):
        yield from _is_no(path, comment.line, comment.text)
    for message in messages(tree):
        for part in literals(message):
            yield from _is_no(path, part.lineno, str(part.value))
    lines = source.splitlines()
    for line, name in names(tree):
        if name in NAMES:
            yield Fault(path, line, f'name "{name}"', lines[line - 1])


def _is_no(path: Path, line: int, text: str) -> Iterator[Fault]:
    text = " ".join(text.split())
    if (match := IS_NO.search(f"{text} ")) is not None:
        around = text[max(0, match.start() - 40) : match.end() + 40]
        yield Fault(path, line, f'"{match[0]}" instead of "{match[0]}t a"', around)


def repeated_classes(paths: list[Path]) -> Iterator[Fault]:
    """Yield a fault for each class of the package whose name another class of the package has, too."""
    places: dict[str, list[tuple[Path, int]]] = defaultdict(list)
    for path in paths:
        if path.parts[0] == PACKAGE:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append((path, node.lineno))
    for name, classes in places.items():
        for path, line in classes if len(classes) > 1 else []:
            yield Fault(path, line, f'class name "{name}" used {len(classes)} times', f"class {name}")


def strategy_questions(path: Path) -> Iterator[Fault]:
    """Yield a fault for each look at a strategy's class or attributes in the package; `facts_of` has the answers.

    Configurations are not looked at: in them a strategy is a name, a dictionary or an object with `init_args`.
    """
    if path.parts[0] != PACKAGE or path == INTERFACE:
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in QUESTIONS or len(node.args) < 2:
            continue
        subject, answer = node.args[:2]
        name = getattr(subject, "id", getattr(subject, "attr", ""))
        if name == "strategy" and ast.unparse(answer) not in IN_CONFIGURATIONS:
            yield Fault(path, node.lineno, "strategy asked without facts_of", ast.unparse(node))


def files_in(folders: list[str]) -> list[Path]:
    """Return the Python files of some folders; a folder may also be a file."""
    return [
        path
        for folder in map(Path, folders)
        for path in (sorted(folder.rglob("*.py")) if folder.is_dir() else [folder])
    ]


def covering(path: Path, exceptions: list[str]) -> list[str]:
    """Return the exceptions that are this file, or a folder (its name ends with a slash) above it."""
    name = path.as_posix()
    return [entry for entry in exceptions if name == entry or (entry.endswith("/") and name.startswith(entry))]


def main() -> int:
    """Print the faults that no exception covers and the exceptions without faults; return 1 if there are any."""
    parser = argparse.ArgumentParser(description="Check docstrings, comments, messages and names.")
    parser.add_argument("folders", nargs="*", help="Folders or files to check, exceptions included.")
    parser.add_argument("--exceptions", type=Path, default=EXCEPTIONS, help="List of files that may have faults.")
    parser.add_argument("--shrink", action="store_true", help="Remove exceptions without faults from the list.")
    options = parser.parse_args()
    paths = files_in(options.folders or [folder for folder in CHECKED if Path(folder).exists()])
    faults = [fault for path in paths for check in (faults_of, strategy_questions) for fault in check(path)]
    faults += repeated_classes(paths)
    if options.folders:
        exceptions: list[str] = []
    else:
        lines = options.exceptions.read_text(encoding="utf-8").splitlines() if options.exceptions.exists() else []
        exceptions = [line for line in lines if line and not line.startswith("#")]
    needed = {entry for fault in faults for entry in covering(fault.path, exceptions)}
    unneeded = [entry for entry in exceptions if entry not in needed]
    if options.shrink and unneeded:
        kept = [line for line in lines if line not in unneeded]
        options.exceptions.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        print(f"{len(unneeded)} exceptions removed from {options.exceptions}")
        unneeded = []
    remaining = [fault for fault in faults if not covering(fault.path, exceptions)]
    for fault in remaining:
        print(fault)
    for entry in unneeded:
        print(f"{options.exceptions.name}: {entry} has no faults any more; remove it, or run this script with --shrink")
    if not remaining and not unneeded:
        print(f"Words: no faults in {len(paths)} files ({len(exceptions)} exceptions).")
    return int(bool(remaining or unneeded))


if __name__ == "__main__":
    sys.exit(main())
