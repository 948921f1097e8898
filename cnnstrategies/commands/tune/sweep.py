"""``cnnstrategies sweep``: search for good values of a configuration by training with them.

It needs neither torch nor Lightning itself: each trial is a program.
"""

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console

from cnnstrategies.commands.front import early, recipes
from cnnstrategies.commands.front.options import sweep_parser
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.planning.tune.settings import nested, write_commented
from cnnstrategies.sweeping.plan import Plan, Scalar, read

if TYPE_CHECKING:
    from cnnstrategies.sweeping.study import Study

BEST, PICTURE = "best.yaml", "sweep.png"
HOPELESS = 3  # trials that fail, before any has a value: the configuration does not run


def main(args: Sequence[str]) -> None:
    """Run the trials that are left, print all of them, and write the best values.

    Args:
        args: The command line from ``sweep`` on.

    Raises:
        ConfigurationError: The sweep or the configuration is mistaken, or no trial runs.
    """
    options, rest = sweep_parser().parse_known_args(args[1:])
    plan = read(options.sweep)
    words = recipes.with_files(["fit", *rest])
    early.check([*words, *(f"--{key}={_as_word(space.first)}" for key, space in plan.parameters.items())])
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ConfigurationError("sweep needs Optuna: pip install '.[sweep]' in a clone") from error
    search(plan, words, options.folder or Path("sweeps") / options.sweep.stem)


def search(plan: Plan, words: Sequence[str], folder: Path) -> None:
    """Run the trials.

    Args:
        plan: The sweep.
        words: The command line of ``fit``.
        folder: The sweep's.

    Raises:
        ConfigurationError: No trial runs.
    """
    from cnnstrategies.sweeping import report
    from cnnstrategies.sweeping.study import Study
    from cnnstrategies.sweeping.trial import run

    study = Study(folder, plan)
    console = Console(soft_wrap=True)
    stopped = False
    try:
        with _sigterm_as_ctrl_c():
            while True:
                with study.next() as trial:
                    if trial is None:
                        break
                    console.print(f"Trial {trial.number}: {report.in_words(trial.params)}", highlight=False)
                    end = run(study, trial, words)
                    console.print(f"  {end}", highlight=False)
                causes = [one.user_attrs.get("cause") for one in study.trials]
                if study.best is None and len(causes) >= HOPELESS and all(causes):
                    raise ConfigurationError(
                        f"sweep: the first {len(causes)} trials have failed, the last with: {causes[-1]}; see "
                        f"{study.place(trial.number) / 'output.log'}"
                    )
    except KeyboardInterrupt:
        stopped = True
    _tell(console, study, plan, stopped)


def _as_word(value: Scalar) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _tell(console: Console, study: "Study", plan: Plan, stopped: bool) -> None:
    from cnnstrategies.sweeping import report

    if stopped:
        console.print("Stopped: the same command goes on. What is known so far is")
    console.print(report.table(study.trials, plan), soft_wrap=False)
    best = study.best
    if best is None:
        return
    report.draw(study.trials, plan, study.folder / PICTURE)
    line = f"trial {best.number} of {len(study.trials)}: {plan.metric} {best.values[0]:.6g}, by cnnstrategies sweep"
    write_commented(study.folder / BEST, nested(best.params), [line])
    print(f"Drew {study.folder / PICTURE}")
    print(f"Wrote {study.folder / BEST}: cnnstrategies fit --config YOURS --config {study.folder / BEST}")


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """So end schedulers what they have started."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {one: signal.signal(one, interrupt) for one in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
