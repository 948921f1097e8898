"""Records: dataclasses of texts, numbers and truth values that another process or a file describes as JSON.

Every value is checked before a record is created, because the JSON may come from a program of another version, from a
damaged file, or from a stranger.
"""

import json
from dataclasses import fields
from typing import Any, TypeVar

R = TypeVar("R")


def parsed(content: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: The content is not JSON.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def record(kind: type[R], values: object, longest: int, largest: int) -> R:
    """Return a record with checked values.

    Args:
        kind: Dataclass whose fields have the types str, int, float or bool.
        values: Dictionary of the values of all fields, by name.
        longest: Largest number of characters of a text. A text must also be printable.
        largest: First number that is too large. Negative numbers are not allowed.

    Raises:
        ValueError: The values are not the values of such a record. The error message does not contain them.
    """
    types: dict[str, Any] = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(values, dict) or values.keys() != types.keys():
        raise ValueError(f"the values do not have the names of the fields of {kind.__name__}")
    for name, value in values.items():
        # Python writes a float such as 3.0 so that it stays a float, but other programs write an integer.
        allowed = (int, float) if types[name] is float else (types[name],)
        if type(value) not in allowed:
            raise ValueError(f"{name} has another type")
        if isinstance(value, str) and (len(value) > longest or not value.isprintable()):
            raise ValueError(f"{name} is too long or not printable")
        if isinstance(value, int | float) and not 0 <= value < largest:
            raise ValueError(f"{name} is out of range")
    return kind(**values)


def printable(text: str, longest: int) -> str:
    """Return a text that :func:`record` accepts. The text is cut, and characters that are not printable become "?"."""
    return "".join(character if character.isprintable() else "?" for character in text[:longest])
