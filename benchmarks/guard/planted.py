"""Sixty planted faults in small training programs on two ranks: which of them `verify` finds, and what it names.

Each row is a program with one fault. "Where" is the truth: the module, the rank and the first step in which the fault
acts. The module counts as named if the line names it or a layer beside it. All programs were also run without the
fault.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "pipeline"), str(Path(__file__).parent)]

import data_faults  # noqa: F401  # These modules register their faults.
import hardware_faults  # noqa: F401
import rank_faults  # noqa: F401
import torch
import training_faults  # noqa: F401
from programs import FAULTS, Fault, Net, Program
from ranks import report

import cnnstrategies
from cnnstrategies.errors import ConfigurationError

HERE = Path(__file__).parent
LONGEST = 120  # Number of characters of a line on the page.
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
    """

    is_fault: bool
    text: str
    name: str = ""
    rank: int | None = None
    step: int | None = None


def verified(program: Program) -> Answer:
    """Return the answer of `verify`. A strategy that refuses the run and says why has found the fault as well."""
    try:
        verdict = cnnstrategies.verify(
            program.module, program.data, program.strategy, steps=STEPS, callbacks=program.callbacks, **program.trainer
        )
    except ConfigurationError as error:
        return Answer(True, f"refused: {error}", next(iter(re.findall(r"\b(\w+(?:\.\w+)+)\b", str(error))), ""))
    if verdict.equal:
        return Answer(False, "equal")
    for note in verdict.notes:
        if match := FIRST.match(note) or UNDEFINED.match(note):
            rank = match.groupdict().get("rank")
            return Answer(True, note, match["name"], rank if rank is None else int(rank), int(match["step"]))
    rows = [f"{row.name}: {row.text}" for row in verdict.rows if not row.equal]
    names = [name for row in rows for name in re.findall(r"most strongly ([\w.]+)", row)]
    return Answer(True, "; ".join(rows), next(iter(names), ""))


TOOLS: dict[str, Callable[[Program], Answer]] = {"verify": verified}


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


def cell(answer: Answer | None) -> str:
    """Return what a tool has found, for the page."""
    if answer is None:
        return ""
    if not answer.is_fault:
        return "not found"
    text = answer.text.partition(": differs by")[0].removeprefix("first: ")
    if text.startswith("steps: "):
        text = text.rpartition("; ")[2]  # Before this, the row counts samples and batches.
    return text if len(text) < LONGEST else f"{text[:LONGEST]}..."


def is_named(answer: Answer | None, fault: Fault) -> bool:
    """Return whether a tool's line names the module with the fault, or a layer beside it."""
    return answer is not None and answer.is_fault and is_near(answer.name, fault.module, fault.program().module)


def truth_of(fault: Fault) -> str:
    """Return where a fault is, for the page."""
    words = [fault.module, "" if fault.rank is None else f"rank {fault.rank}", f"step {fault.step}"]
    return ", ".join(filter(None, words))


class Results:
    """Answers that are kept in a file, so that the script can be continued.

    Args:
        file: The file, in JSON; None to keep the answers in memory only.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._values: dict[str, Any] = json.loads(file.read_text()) if file is not None and file.exists() else {}

    def get(self, tool: str, name: str, faulty: bool) -> Answer | None:
        """Return a tool's answer about a program, if it is known."""
        values = self._values.get(f"{tool}/{name}/{'faulty' if faulty else 'healthy'}")
        return None if values is None else Answer(**values)

    def put(self, tool: str, name: str, faulty: bool, answer: Answer) -> None:
        """Keep a tool's answer about a program."""
        self._values[f"{tool}/{name}/{'faulty' if faulty else 'healthy'}"] = asdict(answer)
        if self._file is not None:
            self._file.write_text(json.dumps(self._values, indent=1))


def rows(results: Results) -> list[list[str]]:
    """Return the page's table."""
    table = [["fault", "known from", "where", *TOOLS, "module named"]]
    for fault in FAULTS.values():
        answers = [results.get(tool, fault.name, True) for tool in TOOLS]
        named = any(is_named(answer, fault) for answer in answers)
        cells = [cell(answer) for answer in answers]
        table.append(
            [fault.text, fault.source, truth_of(fault), *cells, ("yes" if named else "no") if fault.module else ""]
        )
    return table


def summary(results: Results) -> str:
    """Return the numbers of faults that were found, of modules that were named, and of false alarms."""
    answers = {fault.name: [results.get(tool, fault.name, True) for tool in TOOLS] for fault in FAULTS.values()}
    located = [fault for fault in FAULTS.values() if fault.module]
    count = sum(any(answer and answer.is_fault for answer in row) for row in answers.values())
    named = sum(any(is_named(answer, fault) for answer in answers[fault.name]) for fault in located)
    healthy = [results.get(tool, name, False) for tool in TOOLS for name in FAULTS]
    alarms = sum(answer is not None and answer.is_fault for answer in healthy)
    return (
        f"Of {len(FAULTS)} faults {count} were found. Of the {len(located)} faults in a module, the module was named "
        f"for {named}.\nWithout their faults, the programs raised {alarms} alarms."
    )


def main() -> None:
    """Run all programs, or some, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="faults whose names contain these words")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="tool that is run; by default all")
    parser.add_argument("--results", type=Path, help="file that keeps answers; known answers are not computed again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(options.results)
    wanted = [fault for name, fault in FAULTS.items() if not options.only or any(word in name for word in options.only)]
    for fault in wanted:
        for tool in options.tool or TOOLS:
            for faulty in (True, False):
                if results.get(tool, fault.name, faulty) is not None:
                    continue
                began = time.monotonic()
                answer = TOOLS[tool](fault.program(faulty))
                results.put(tool, fault.name, faulty, answer)
                kind = fault.name if faulty else f"without {fault.name}"
                print(f"{time.monotonic() - began:.1f} s, {tool}, {kind}: {answer.text}", flush=True)
    if not options.only:
        report(HERE / "planted.md", "Planted faults", f"{(__doc__ or '').strip()}\n\n{summary(results)}", rows(results))


if __name__ == "__main__":
    main()
