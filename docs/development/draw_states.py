"""Draw the state tables of the parameter server: ``python docs/development/draw_states.py`` writes states.md."""

import inspect
import re
import textwrap
from enum import StrEnum
from pathlib import Path
from typing import Any

from cnnstrategies.paramserver.coordinator.places import PLACE
from cnnstrategies.paramserver.core.node import StateTable
from cnnstrategies.paramserver.server.copies import HELD_SLICE
from cnnstrategies.paramserver.server.decision import COMMON_STEP
from cnnstrategies.paramserver.worker.registration import REGISTRATION

PAGE = Path(__file__).with_name("states.md")
TABLES: list[tuple[StateTable[Any, Any], str, str]] = [
    (
        PLACE,
        "A member",
        "The coordinator has a place for each server, each worker and each joiner. The places are the only record of "
        "which processes are alive; views are made from them.",
    ),
    (
        REGISTRATION,
        "A worker's registration with the servers",
        "A worker that takes part in steps is entering or training. The other workers then wait for its gradients in "
        "the modes with common steps.",
    ),
    (
        COMMON_STEP,
        "A common step on a server",
        "In the modes with common steps, each server has the leader's last decision. A decision about a later step "
        "begins that step.",
    ),
    (
        HELD_SLICE,
        "A slice on a server",
        "Each server has a state for each slice that it holds. A primary sends whole copies to the servers with "
        "backups, and then each update.",
    ),
]
HEAD = """# States of the parameter server

Each state machine of a role has a table of its states and events. An event that has no entry in the table ends the
process with an error that names the state and the event. `python docs/development/draw_states.py` makes this page from
the tables. [The architecture page](architecture.md) follows a gradient and the death of a server through the code.
"""


def page() -> str:
    """Return the text of the page."""
    return "\n".join([HEAD, *(section(*entry) for entry in TABLES)])


def section(table: StateTable[Any, Any], title: str, text: str) -> str:
    """Return the section of the page with a table's drawing, and the meanings of the table's states and events."""
    events = type(next(event for row in table.rows.values() for event in row))
    described = [meanings("State", type(table.start)), meanings("Event", events)]
    parts = [f"## {title}", textwrap.fill(text, 120), drawing(table), *described]
    return "\n\n".join(parts) + "\n"


def drawing(table: StateTable[Any, Any]) -> str:
    """Return a diagram of a table in the language of Mermaid. Events that do not change a state are left out."""
    lines = [f"    [*] --> {table.start.name}"]
    for state, row in table.rows.items():
        arrows: dict[StrEnum, list[str]] = {}
        for event, following in row.items():
            arrows.setdefault(following, []).append(event.value)
        lines += [
            f"    {state.name} --> {following.name}: {', '.join(names)}"
            for following, names in arrows.items()
            if following != state
        ]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def meanings(title: str, names: type[StrEnum]) -> str:
    """Return a table with the names of an enumeration, and their descriptions in its docstring."""
    described = re.findall(
        r"^ {4}(\w+): (.*(?:\n {8}.*)*)", inspect.cleandoc(names.__doc__ or "").split("Attributes:")[-1], re.M
    )
    rows = [f"| {names[name].value} | {' '.join(text.split())} |" for name, text in described]
    assert len(rows) == len(names), f"describe each name of {names.__name__} in its docstring"
    return "\n".join([f"| {title} | Meaning |", "| --- | --- |", *rows])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
