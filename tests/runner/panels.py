"""The tables of names and texts that a run prints."""


def rows(output: str, title: str = "Training") -> dict[str, str]:
    """Return the texts of the table with that title, by row name; the lines of a text are joined by newlines."""
    lines = [line.rstrip() for line in output.splitlines()]
    assert lines.count(title) == 1, f"{lines.count(title)} tables {title!r} in:\n{output}"
    texts: dict[str, str] = {}
    last = ""
    for line in lines[lines.index(title) + 1 :]:
        if not line.startswith("  "):
            break
        name, _, text = line[2:].partition("  ")
        if name:
            texts[last := name] = text.strip()
        else:
            texts[last] += f"\n{text.strip()}"
    return texts
