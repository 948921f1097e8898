"""Answers of `verify` and of the guard about a program, and the modules that they name."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from guarded import EVERY, findings_of
from programs import Fault, Net, Program

import cnnstrategies
from cnnstrategies.errors import ConfigurationError

NAME = re.compile(r"\b\w+(?:\.\w+)+\b")  # Name of a parameter or a layer.

REFUSAL = re.compile(r"ConfigurationError: (.*)")

STEPS = 8  # Steps of the runs of `verify`; an epoch has six.

FIRST = re.compile(r"first: [a-z ]+ of (?P<name>\S+), step (?P<step>\d+),.* rank (?P<rank>\d+): ")

UNDEFINED = re.compile(r"first NaN or infinity, also on one device: .*?(?P<name>[\w.]+), step (?P<step>\d+)$")


@dataclass(frozen=True)
class Answer:
    """Answer of a tool about a run.

    Attributes:
        is_fault: Whether the tool says that something is wrong.
        text: The tool's line.
        name: Name of the module, parameter or buffer that the line names; empty if it names none.
        rank: Rank that the line names; None if it names none.
        step: Step that the line names; None if it names none.
        check: Name of the guard's check.
    """

    is_fault: bool
    text: str
    name: str = ""
    rank: int | None = None
    step: int | None = None
    check: str = ""


def verified(program: Program, _: int) -> Answer:
    """Return the answer of `verify`. A strategy that refuses the run and says why has found the fault as well."""
    try:
        verdict = cnnstrategies.verify(
            program.module, program.data, program.strategy, steps=STEPS, callbacks=program.callbacks, **program.trainer
        )
    except ConfigurationError as error:
        return Answer(True, f"refused: {error}", next(iter(NAME.findall(str(error))), ""))
    if warnings := [note for note in verdict.notes if note.startswith("samples: ")]:
        return Answer(True, warnings[0])
    if verdict.equal:
        return Answer(False, "equal")
    for note in verdict.notes:
        if match := FIRST.match(note) or UNDEFINED.match(note):
            rank = match.groupdict().get("rank")
            return Answer(True, note, match["name"], rank if rank is None else int(rank), int(match["step"]))
    rows = [f"{row.name}: {row.text}" for row in verdict.rows if not row.equal]
    names = [name for row in rows for name in re.findall(r"most strongly ([\w.]+)", row)]
    return Answer(True, "; ".join(rows), next(iter(names), ""))


def guarded(program: Program, steps: int) -> Answer:
    """Return the answer of the guard."""
    try:
        findings = findings_of(program, steps)
    except RuntimeError as error:
        refusals = REFUSAL.findall(str(error))
        if not refusals:
            raise
        return Answer(True, f"refused: {refusals[0]}", next(iter(NAME.findall(refusals[0])), ""))
    if not findings:
        return Answer(False, "no finding")
    first = findings[0]
    parts = {name for name, _ in [*program.module.named_parameters(), *program.module.named_modules()]}
    names = [name for name in NAME.findall(f"{first.tensor} {first.fault}") if name in parts]
    return Answer(True, str(first), next(iter(names), ""), first.rank, first.step, first.check)


TOOLS: dict[str, Callable[[Program, int], Answer]] = {"verify": verified, "guard": guarded}


def is_near(named: str, truth: str, module: Net) -> bool:
    """Return whether a name is that of a module, or of a layer beside it.

    Args:
        named: Name of a module, parameter or buffer. A container stands for its first and its last layer.
        truth: Name of the layer with the fault.
        module: The program's module.
    """
    layers = [name for name, part in module.named_modules() if name and not any(part.children())]
    names = {name for name, _ in module.named_modules()}
    while named and named not in names:
        named = named.rpartition(".")[0]
    inside = [number for number, name in enumerate(layers) if f"{name}.".startswith(f"{named}.")]
    if not named or truth not in layers or not inside:
        return False
    return min(abs(layers.index(truth) - end) for end in (inside[0], inside[-1])) <= 1


def is_found(fault: Fault, answers: Iterable[Answer | None]) -> bool:
    """Return whether `verify` has found a fault, or the guard within two checks."""
    return any(
        answer is not None and answer.is_fault and (answer.check == "" or (answer.step or 0) <= fault.step + 2 * EVERY)
        for answer in answers
    )
