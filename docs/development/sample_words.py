"""Print docstrings, comments and messages of the package, drawn at random, for a reader to mark.

    python docs/development/sample_words.py --seed 1
    python docs/development/sample_words.py --seed 1 cnnstrategies/data cnnstrategies/pipeline

A reader who has only the repository marks each text that has to be read twice. Each text is printed with its place and
with the code that a reader of the file sees beside it: a docstring with its signature, a comment with the two lines of
code after it, a message with its whole statement. Without folders the texts come from the whole package.
"""

import argparse
import ast
import random
from pathlib import Path

from check_words import PACKAGE, Comment, comments, docstrings, files_in, messages


def signature(node: ast.AST) -> str:
    """Return the first lines of a class or function as they would be written without a body."""
    if isinstance(node, ast.Module):
        return "(module)"
    assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    code = ast.unparse(node).splitlines()
    for number, line in enumerate(code):
        if line.startswith(("def ", "async def ", "class ")):
            return "\n".join(code[: number + 1])
    raise ValueError(f"no signature in {code[0]!r}")


def around(comment: Comment, lines: list[str]) -> str:
    """Return a comment with the two lines of code that follow, or the line of code that it ends."""
    following = [line for line in lines[comment.end :] if line.strip()]
    return "\n".join(lines[comment.line - 1 : comment.end] + ([] if comment.trails else following[:2]))


def whole_statement(node: ast.AST, statements: list[ast.stmt]) -> ast.AST:
    """Return the smallest simple statement around an expression, or the expression if only a block contains it."""
    simple = [
        statement
        for statement in statements
        if statement.lineno <= node.lineno and node.end_lineno <= (statement.end_lineno or 0)  # type: ignore[attr-defined]
    ]
    return min(simple, key=lambda statement: (statement.end_lineno or 0) - statement.lineno, default=node)


def texts_of(path: Path) -> dict[str, list[str]]:
    """Return the texts of a file by kind, each as it is printed."""
    source = path.read_text(encoding="utf-8")
    lines, tree = source.splitlines(), ast.parse(source)
    simple = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and not isinstance(node, ast.Match)
    ]
    texts: dict[str, list[str]] = {"docstrings": [], "comments": [], "messages": []}
    for node, constant in docstrings(tree):
        shown = lines[constant.lineno - 1 : constant.end_lineno]
        texts["docstrings"].append(f"{path}:{constant.lineno}\n{signature(node)}\n" + "\n".join(shown))
    for comment in comments(source):
        if not comment.text.startswith(("type: ignore", "fmt:", "noqa")):
            texts["comments"].append(f"{path}:{comment.line}\n{around(comment, lines)}")
    for message in messages(tree):
        statement = whole_statement(message, simple)
        shown = lines[statement.lineno - 1 : statement.end_lineno]  # type: ignore[attr-defined]
        texts["messages"].append(f"{path}:{message.lineno}\n" + "\n".join(shown))
    return texts


def main() -> None:
    """Draw the texts and print them."""
    parser = argparse.ArgumentParser(description="Print texts of the package, drawn at random.")
    parser.add_argument("folders", nargs="*", default=[PACKAGE], help="Folders or files to draw from.")
    parser.add_argument("--seed", type=int, default=1, help="Seed of the draw.")
    parser.add_argument("--docstrings", type=int, default=60, help="Number of docstrings.")
    parser.add_argument("--comments", type=int, default=30, help="Number of comments.")
    parser.add_argument("--messages", type=int, default=30, help="Number of messages.")
    options = parser.parse_args()
    texts: dict[str, list[str]] = {"docstrings": [], "comments": [], "messages": []}
    for path in files_in(options.folders):
        for kind, drawn in texts_of(path).items():
            texts[kind] += drawn
    random_numbers = random.Random(options.seed)
    for kind, candidates in texts.items():
        count = min(getattr(options, kind), len(candidates))
        print(f"# {count} of {len(candidates)} {kind}\n")
        for number, text in enumerate(random_numbers.sample(candidates, count), 1):
            print(f"## {kind[:-1]} {number}: {text}\n")


if __name__ == "__main__":
    main()
