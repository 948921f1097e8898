"""Runs that end with an exception on one rank or on all ranks, for tests of several launchers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.cluster.processes_of import fit
from tests.strategies.fault_injection import fault_arguments

BOOM = "AssertionError: no process nobody"


# A rank that the system kills prints nothing. The other rank prints this line, although both are the launcher's.
KILLED = (
    r"The run cannot continue: rank 1 was killed, as the system does when memory runs out; in step {} it had held "
    r"[\d,]+ MB of main memory \(predicted: .*\); if memory has run out, a plan that fits by prediction: "
)


class Failing(NamedTuple):
    """A run of two ranks that ends with an exception at its third step.

    Attributes:
        strategy: Registered name of the strategy.
        fails: The rank that raises the exception; None for all ranks. All ranks save a checkpoint together, so no
            checkpoint is saved if one rank has failed.
    """

    strategy: str
    fails: int | None

    @property
    def name(self) -> str:
        return f"{self.strategy}-{'all' if self.fails is None else self.fails}"

    def check(self, log: str | None = None, codes: Sequence[str] = ()) -> None:
        """Check the output, the exit codes and the checkpoints of the run.

        Args:
            log: Output of the run; None for the output in the run's own file.
            codes: Exit codes of the ranks or of the launcher; empty for the codes in the run's own file.
        """
        log = Path(f"{self.name}.log").read_text() if log is None else log
        codes = codes or Path(f"{self.name}.codes").read_text().split()
        assert set(codes) == {"1"}, f"{codes} {log}"
        assert log.splitlines()[-1].endswith(BOOM), log
        # Each rank of a parameter server may print its own exception.
        assert log.count("Traceback") == 1 or (self.strategy == "parameter_server" and self.fails is None), log
        saved = list(Path("runs/quickstart").glob(f"{self.name}/checkpoints/best.ckpt"))
        assert len(saved) == (self.fails is None), log


def failing_runs(*runs: Failing) -> list[tuple[str, list[str], list[str]]]:
    """Return the failing runs in the form in which `several_runs.py` reads runs."""
    listed: list[tuple[str, list[str], list[str]]] = []
    for run in runs:
        fault = fault_arguments(victim="nobody", rank="null" if run.fails is None else run.fails, step=2)
        options = (f"--trainer.strategy={run.strategy}", f"--run_name={run.name}", "--trainer.num_sanity_val_steps=0")
        listed.append((run.name, fit(*options, *fault, "--checkpoint.save_on_exception=true"), []))
    return listed


def several_runs(*runs: tuple[str, list[str], list[str]]) -> list[str]:
    """Return the arguments after the interpreter for a launcher that starts the runs, one after the other."""
    return ["-m", "tests.cluster.several_runs", json.dumps(runs)]
