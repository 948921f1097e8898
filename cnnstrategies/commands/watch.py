"""``cnnstrategies watch``: a table of a run with a parameter server, while it trains.

It speaks with the coordinator alone, and needs neither torch nor Lightning.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from cnnstrategies.commands.watch_options import parser
from cnnstrategies.commands.watch_table import table
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.drivers.watcher import Watcher
from cnnstrategies.paramserver.run_address import RunAddress
from cnnstrategies.paramserver.security import KeyPair

ANSWER_SECONDS = 2.0
FIRST_SECONDS = 10.0  # for the first answer: a coordinator may be starting again
PAUSE = 1.0  # between two questions

Answer = Mapping[str, Any]


class RunGoneError(Exception):
    """The run is over; the text says what is known of it."""


def main(args: Sequence[str]) -> None:
    """Watch a run until it ends, or once.

    Args:
        args: The command line from ``watch`` on.

    Raises:
        ConfigurationError: No coordinator answers.
    """
    options = parser().parse_args(args[1:])
    address = RunAddress.find(options.run)
    key_file = options.key_file or address.key_file
    console = Console()
    with Watcher(address.coordinator, _keys(key_file)) as watcher:
        answers = _answers(watcher, address, key_file)
        try:
            # Two, since all speeds are differences.
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
            f"--key_file {path}: {error.strerror}; it lies on the machine of rank 0 unless the run was given one"
        ) from error


def _answers(watcher: Watcher, address: RunAddress, key_file: str | None) -> Iterator[Answer]:
    """What the coordinator says, once a second.

    Raises:
        ConfigurationError: It has never answered.
        RunGoneError: It answers no more, or says that the run is over.
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
        elif last is None and (_is_gone(address) or now - heard > FIRST_SECONDS):
            keys = "it has keys: give --key_file" if key_file is None else f"its keys are not those of {key_file}"
            raise ConfigurationError(
                f"no coordinator answers at {address.coordinator}: the run does not train, is not reached from here, "
                f"or {keys}"
            )
        elif last is not None and (_is_gone(address) or now - heard > last["timeout"]):
            raise RunGoneError(f"The run is over: its coordinator at {address.coordinator} has gone")
        time.sleep(max(0.0, asked + PAUSE - now))


def _is_gone(address: RunAddress) -> bool:
    """Whether nothing can listen at an address any more."""
    path = address.coordinator.removeprefix("ipc://")
    return path != address.coordinator and not Path(path).exists()
