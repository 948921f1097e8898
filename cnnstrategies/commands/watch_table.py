"""The table of ``cnnstrategies watch``: two answers of a coordinator, and what has changed between them."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from cnnstrategies.paramserver.coordinator.roster import LIVES

MOST_FAULTS = 8  # that are shown
HEADERS = ("step", "steps\n/s", "samples\n/s", "stale\nsteps", "sent\nMB/s", "recvd\nMB/s", "waits\n%", "silent\ns")
LONGEST = 16  # letters of a host's name
SILENT = 2.0  # seconds: a heartbeat or two may be late

Answer = Mapping[str, Any]


def table(before: Answer, now: Answer) -> RenderableType:
    """What is shown.

    Args:
        before: An answer.
        now: A later one.
    """
    parts: list[RenderableType] = [_title(now), _members(before, now)]
    if now["missing"]:
        parts.append(Text(f"not here yet: {', '.join(now['missing'])}"))
    parts += [Text(_plain(f"{who} in `{what}` for {others}"), "yellow") for what, who, others in now["waits"]]
    faults = now["faults"][-MOST_FAULTS:]
    parts += [Text(_plain(f"{_ago(seconds)} ago: {text}"), "red") for seconds, text in reversed(faults)]
    return Group(*parts)


def _title(now: Answer) -> Text:
    counts = [sum(one["role"] == role for one in now["members"]) for role in ("worker", "server")]
    what = "trains" if now["training"] else "is being set up"
    lost = f", {now['losses']} lost" if now["losses"] else ""
    return Text(f"The run {what}: workers {counts[0]}, servers {counts[1]}{lost}", "bold")


def _members(before: Answer, now: Answer) -> Table:
    numbers = [Column(header, justify="right", no_wrap=True) for header in HEADERS]
    columns = Column("member", no_wrap=True), Column("host", no_wrap=True), *numbers
    result = Table(*columns, box=None, padding=(0, 1, 0, 0))
    older = {_key(one): one for one in before["members"]} if before["term"] == now["term"] else {}
    for one in now["members"]:
        rates = _rates(older.get(_key(one)), one)
        silent = one["silent"]
        result.add_row(
            _name(one),
            escape(_plain(f"{one['host'].partition('.')[0][:LONGEST]}:{one['process']}")),
            _number(one["figures"].get("step")),
            _number(rates.get("step")),
            _number(rates.get("samples")),
            _number(_ratio(rates.get("staleness"), rates.get("step"))),
            _bytes(rates.get("sent")),
            _bytes(rates.get("received")),
            _number(None if (waited := rates.get("waited")) is None else float(round(100 * waited))),
            _number(float(round(silent))) if silent > SILENT else "",
        )
    return result


def _name(member: Answer) -> str:
    name = f"{member['role']} {member['id']}"
    if life := member["life"] % LIVES:  # Who joins after a restart of the coordinator begins at a higher number.
        name += f", life {life + 1}"
    return name if member["takes_part"] else f"{name}, joins"


def _key(member: Answer) -> tuple[str, int, int, int]:
    return member["role"], member["id"], member["life"], member["process"]


def _rates(older: Answer | None, member: Answer) -> dict[str, float]:
    """What a member's figures have grown by in a second."""
    seconds = 0.0 if older is None else member["measured"] - older["measured"]
    if older is None or seconds <= 0:
        return {}
    figures = older["figures"]
    known = {name: value - figures[name] for name, value in member["figures"].items() if name in figures}
    # A server counts the updates of the slices that it answers for, which may become more.
    return {name: max(0.0, more) / seconds for name, more in known.items()}


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _bytes(value: float | None) -> str:
    return "" if value is None else f"{value / 1e6:.1f}"


def _plain(text: str) -> str:
    """A text of another process without what would steer the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
