"""``cnnstrategies watch``: show a table about a run with a parameter server while the run trains.

The command connects to the run's coordinator only. It imports neither torch nor Lightning.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from cnnstrategies.commands.arguments.options import WatchOptions
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.places import RunAddress, Watcher
from cnnstrategies.paramserver.security import KeyPair

MOST_FAULTS = 8  # Largest number of failures that the display lists. The newest failure comes first.
HEADERS = ("step", "steps\n/s", "samples\n/s", "stale\nsteps", "sent\nMB/s", "recvd\nMB/s", "waits\n%", "silent\ns")
LONGEST = 16  # Longer names of hosts are cut off after this number of characters.
# Threshold in seconds. The table shows the time since a member's last heartbeat only if the time is longer than this
# threshold. Shorter times are normal, because a few heartbeats may be late.
SILENT = 2.0

Answer = Mapping[str, Any]


def table(before: Answer, now: Answer) -> RenderableType:
    """Return the display of a run, from two consecutive status reports of the run's coordinator."""
    parts: list[RenderableType] = [_title(now), _members(before, now)]
    if now["missing"]:
        parts.append(Text(f"not registered yet: {', '.join(now['missing'])}"))
    parts += [
        Text(_plain(f"{member} in `{collective}` for {others}"), "yellow")
        for collective, member, others in now["waits"]
    ]
    faults = now["faults"][-MOST_FAULTS:]
    parts += [Text(_plain(f"{_ago(seconds)} ago: {text}"), "red") for seconds, text in reversed(faults)]
    return Group(*parts)


def _title(now: Answer) -> Text:
    counts = [sum(member["role"] == role for member in now["members"]) for role in ("worker", "server")]
    state = "trains" if now["training"] else "is being set up"
    lost = f", {now['losses']} lost" if now["losses"] else ""
    return Text(f"The run {state}: workers {counts[0]}, servers {counts[1]}{lost}", "bold")


def _members(before: Answer, now: Answer) -> Table:
    numbers = [Column(header, justify="right", no_wrap=True) for header in HEADERS]
    columns = Column("member", no_wrap=True), Column("host", no_wrap=True), *numbers
    result = Table(*columns, box=None, padding=(0, 1, 0, 0))
    older = {_key(member): member for member in before["members"]}
    for member in now["members"]:
        rates = _rates(older.get(_key(member)), member)
        silent = member["silent"]
        result.add_row(
            _name(member),
            escape(_plain(f"{member['host'].partition('.')[0][:LONGEST]}:{member['process']}")),
            _number(member["figures"].get("step")),
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
    if incarnation := member["incarnation"]:
        name += f", incarnation {incarnation + 1}"
    return name if member["takes_part"] else f"{name}, joins"


def _key(member: Answer) -> tuple[str, int, int, int]:
    return member["role"], member["id"], member["incarnation"], member["process"]


def _rates(older: Answer | None, member: Answer) -> dict[str, float]:
    """Return how much each counter of a member has grown per second between two status reports.

    Args:
        older: The member in the older report; None if the older report does not contain the member. The result is
            then empty.
        member: The member in the newer report.
    """
    seconds = 0.0 if older is None else member["measured"] - older["measured"]
    if older is None or seconds <= 0:
        return {}
    figures = older["figures"]
    known = {name: value - figures[name] for name, value in member["figures"].items() if name in figures}
    # The step count of a server is a mean over its slices. The mean can decrease if the server gets or loses slices, so
    # a negative rate is replaced by 0.
    return {name: max(0.0, more) / seconds for name, more in known.items()}


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or not denominator else numerator / denominator


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _bytes(value: float | None) -> str:
    return "" if value is None else f"{value / 1e6:.1f}"


def _plain(text: str) -> str:
    """Replace each unprintable character of a text by a question mark.

    An unprintable character could control the terminal.
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


ANSWER_SECONDS = 2.0  # Time-out in seconds for the reply to a request.
# Time-out in seconds for the first report. It is longer than `ANSWER_SECONDS`, because the coordinator may be
# restarting.
FIRST_SECONDS = 10.0
PAUSE = 1.0  # Time between two requests for a report, in seconds.


class RunGoneError(Exception):
    """Error that ends the display because the run is over.

    The error message gives the reason if the reason is known.
    """


def main(options: WatchOptions) -> None:
    """Show a table about a run until the run ends. With ``--once``, print the table once."""
    address = RunAddress.find(options.run)
    key_file = address.key_file if options.key_file is None else str(options.key_file)
    console = Console()
    with Watcher(address.coordinator, _keys(key_file)) as watcher:
        answers = _answers(watcher, address, key_file)
        try:
            # The table needs two reports, because speeds are computed from the differences between the reports.
            before, now = next(answers), next(answers)
            if options.once:
                console.print(table(before, now))
                return
            with Live(table(before, now), console=console, auto_refresh=False) as live:
                for answer in answers:
                    before, now = now, answer
                    live.update(table(before, now), refresh=True)
        except RunGoneError as gone:
            console.print(str(gone), markup=False, soft_wrap=True)


def _keys(path: str | None) -> KeyPair | None:
    try:
        return None if path is None else KeyPair.load(path)
    except OSError as error:
        raise ConfigurationError(
            f"--key_file {path}: {error.strerror}; if the run's configuration has no key_file, the run has written its "
            "keys on the machine of rank 0: copy the file from that machine"
        ) from error


def _answers(watcher: Watcher, address: RunAddress, key_file: str | None) -> Iterator[Answer]:
    """Request a status report from the coordinator every second, and yield the reports.

    Raises:
        ConfigurationError: The coordinator has never replied.
        RunGoneError: The coordinator has stopped replying, or reports that the run is over.
    """
    heard = time.monotonic()
    last: Answer | None = None
    while True:
        asked = time.monotonic()
        answer = watcher.ask(ANSWER_SECONDS)
        now = time.monotonic()
        if answer is not None:
            heard, last = now, answer.fields
            if last["ended"] is not None:
                raise RunGoneError(f"The run is over: {last['ended']['message']}")
            yield last
        elif last is None and (address.is_gone or now - heard > FIRST_SECONDS):
            keys = "uses keys (give --key_file)" if key_file is None else f"does not use the keys in {key_file}"
            raise ConfigurationError(
                f"no coordinator answers at {address.coordinator}: the run does not train now, cannot be reached from "
                f"this machine, or {keys}"
            )
        elif last is not None and (address.is_gone or now - heard > last["timeout"]):
            raise RunGoneError(f"The run is over: its coordinator at {address.coordinator} has stopped answering")
        time.sleep(max(0.0, asked + PAUSE - now))
