"""The registry of launchers, and the questions that the rest of the package asks of all of them."""

from typing import TypeVar

from cnnstrategies.cluster.launchers.launcher import Environ, Launcher

LauncherClass = TypeVar("LauncherClass", bound=type[Launcher])
REGISTRY: dict[str, Launcher] = {}


def register(kind: LauncherClass) -> LauncherClass:
    """Add a launcher to the registry; a decorator of its class.

    Raises:
        ValueError: Another launcher has the same name or the same precedence.
    """
    launcher = kind()
    for other in REGISTRY.values():
        if launcher.name == other.name or launcher.precedence == other.precedence:
            raise ValueError(
                f"launcher {launcher.name} (precedence {launcher.precedence}): {type(other).__name__} is registered as "
                f"{other.name} with precedence {other.precedence}; choose another name and another precedence"
            )
    REGISTRY[launcher.name] = launcher
    return kind


def launchers() -> list[Launcher]:
    """Return all launchers by precedence: the innermost one first."""
    return sorted(REGISTRY.values(), key=lambda launcher: launcher.precedence)


def launcher_named(name: str) -> Launcher:
    """Return the launcher with a name of :func:`launchers`."""
    return REGISTRY[name]


def job_launchers() -> list[str]:
    """Return the names that ``submit --to`` accepts."""
    return [launcher.name for launcher in launchers() if launcher.takes_jobs]


def start_programs() -> str:
    """Return the programs that start ranks, as a list in words: "torchrun, mpirun or srun"."""
    *others, last = dict.fromkeys(launcher.program for launcher in launchers() if launcher.program is not None)
    return f"{', '.join(others)} or {last}"


def detected(environ: Environ) -> list[Launcher]:
    """Return the launchers in whose jobs this process runs, the innermost one first; the last one is "none"."""
    return [launcher for launcher in launchers() if launcher.detect(environ)]


def rank_launcher(environ: Environ) -> Launcher | None:
    """Return the launcher that has started this process as one of the run's ranks; None if Lightning starts the ranks.

    Of several launchers the innermost one counts: ranks of an mpirun inside a job of SLURM are mpirun's.
    """
    return next((launcher for launcher in launchers() if launcher.starts_ranks(environ)), None)


def local_rank(environ: Environ) -> int:
    """Return the number of this process on its node, before Lightning has chosen an environment; 0 without a launcher.

    An outer launcher's number counts only if no inner launcher has set one: srun starts one process on each node for an
    mpirun, which is number 0.
    """
    numbers = (launcher.local_number(environ) for launcher in launchers())
    return next((number for number in numbers if number is not None), 0)


def process_number(environ: Environ) -> int:
    """Return the number of this process among all that the innermost launcher has started; 0 without a launcher."""
    numbers = (launcher.number(environ) for launcher in launchers())
    return next((number for number in numbers if number is not None), 0)
