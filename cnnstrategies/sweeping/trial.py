"""A trial of a sweep: a ``fit`` in a program of its own, which is asked for its metric after each validation."""

import contextlib
import json
import math
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from optuna.trial import Trial

from cnnstrategies.planning.tune.program import Program
from cnnstrategies.planning.tune.settings import nested, write_commented
from cnnstrategies.sweeping.study import Study
from cnnstrategies.sweeping.talk import FOLDER, METRIC, SOCKET

COMMAND = "cnnstrategies"
PATIENCE = 30.0  # Seconds in which a run that is interrupted may save.
# Exit codes of a run that was told to end, by its own handler or before there was one.
STOPPED = {code for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) for code in (128 + one, -one)}


def run(study: Study, trial: Trial, words: Sequence[str]) -> str:
    """Train with the values of a trial.

    Args:
        study: Told how it ends.
        trial: It.
        words: The command line of ``fit``.

    Returns:
        How it has ended, in words.

    Raises:
        KeyboardInterrupt: Someone else has stopped it.
    """
    place = study.place(trial.number)
    overlay = place / "overlay.yaml"
    write_commented(overlay, nested(trial.params))
    with tempfile.TemporaryDirectory(prefix="cnnstrategies_sweep_") as temporary:
        socket = Path(temporary) / "trial"
        told = {SOCKET: str(socket), METRIC: study.plan.metric, FOLDER: str(place)}
        program = Program(
            [COMMAND, *words, "--config", str(overlay)],
            place / "output.log",
            socket,
            {**_outside_of_jobs(os.environ), **told},
        )
        try:
            values, pruned = _listen(program, trial)
            code = program.process.wait()
        finally:
            program.close(PATIENCE)
    if code in STOPPED:
        # A scheduler signals all processes of a job, and this one may come last: the trial has not failed.
        raise KeyboardInterrupt
    best = (max if study.plan.most else min)(filter(math.isfinite, values), default=None)
    if code != 0 or best is None:
        cause = program.cause() if code != 0 else f"{study.plan.metric} was never a finite number"
        study.tell(trial, None, False, cause)
        return f"failed: {cause}"
    study.tell(trial, best, pruned)
    return f"{study.plan.metric} {best:.6g}{', pruned' * pruned} after {len(values)} validations"


def _listen(program: Program, trial: Trial) -> tuple[list[float], bool]:
    """Hear what the run reports, until it ends; its values, and whether it was told to end."""
    values: list[float] = []
    pruned = False
    program.listener.settimeout(0.2)
    while program.process.poll() is None:
        try:
            connection, _ = program.listener.accept()
        except TimeoutError:
            continue
        with connection, connection.makefile("rw") as talk, contextlib.suppress(ConnectionError):
            for line in talk:
                values.append(float(json.loads(line)["value"]))
                trial.report(values[-1], step=len(values) - 1)
                pruned = bool(trial.should_prune())  # Some pruners give numpy's.
                talk.write(json.dumps({"prune": pruned}) + "\n")
                talk.flush()
    return values, pruned


def _outside_of_jobs(variables: Mapping[str, str]) -> dict[str, str]:
    """A trial starts its ranks itself: with what SLURM says about a job, each would be rank 0."""
    return {name: value for name, value in variables.items() if not name.startswith(("SLURM_", "PMI_", "PMIX_"))}
