"""The tables of names and texts that a run prints."""


def rows(output: str, title: str = "Training") -> dict[str, str]:
    """The rows of the table with that title, by name; the lines of a text are joined by newlines."""
    lines = [line.strip() for line in output.splitlines()]
    assert lines.count(title) == 1, f"{lines.count(title)} tables {title!r} in:\n{output}"
    lines = iter(lines[lines.index(title) + 1 :])
    found: dict[str, str] = {}
    name = ""
    assert next(lines).startswith("┌")
    for line in lines:
        if line.startswith("└"):
            return found
        left, text = (cell.strip() for cell in line.strip("│").split("│"))
        name = left or name
        found[name] = f"{found[name]}\n{text}" if not left else text
    raise AssertionError(f"the table {title!r} has no end:\n{output}")
