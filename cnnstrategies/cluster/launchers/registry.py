"""Registry of launchers, and functions that search it, for example for the launcher that has started this process."""

from typing import TypeVar

from cnnstrategies.cluster.launchers.launcher import Environ, Launcher

LauncherClass = TypeVar("LauncherClass", bound=type[Launcher])
REGISTRY: dict[str, Launcher] = {}


def register(kind: LauncherClass) -> LauncherClass:
    """Class decorator that adds a launcher to the registry.

    Raises:
        TypeError: The class does not define a required member.
        ValueError: A launcher with the same name or the same precedence is already registered.
    """
    missing = [member for member in ("name", "title", "precedence") if not hasattr(kind, member)]
    missing += sorted(kind.__abstractmethods__)
    if missing:
        raise TypeError(
            f"launcher class {kind.__name__} does not define {', '.join(missing)}: see the descriptions in the class "
            "Launcher"
        )
    launcher = kind()
    for other in REGISTRY.values():
        if launcher.name == other.name:
            raise ValueError(
                f"the launcher classes {type(other).__name__} and {kind.__name__} have the same name {other.name!r}: "
                "choose a different name"
            )
        if launcher.precedence == other.precedence:
            taken = ", ".join(f"{taken.precedence} {taken.name}" for taken in launchers())
            raise ValueError(
                f"the launcher classes {type(other).__name__} and {kind.__name__} have the same precedence "
                f"{other.precedence}: choose a number that is not taken; taken are {taken}"
            )
    REGISTRY[launcher.name] = launcher
    return kind


def launchers() -> list[Launcher]:
    """Return all launchers in the order of their precedence, the innermost launcher first."""
    return sorted(REGISTRY.values(), key=lambda launcher: launcher.precedence)


def launcher_named(name: str) -> Launcher:
    """Return the registered launcher with a name."""
    return REGISTRY[name]


def job_launchers() -> list[str]:
    """Return the names that ``submit --to`` accepts."""
    return [launcher.name for launcher in launchers() if launcher.takes_jobs]


def start_programs() -> str:
    """Return a text that lists the programs that start ranks: "torchrun, mpirun or srun"."""
    *others, last = dict.fromkeys(launcher.program for launcher in launchers() if launcher.program is not None)
    return f"{', '.join(others)} or {last}"


def detected(environ: Environ) -> list[Launcher]:
    """Return the launchers under which this process runs, the innermost launcher first. The last one is "none"."""
    return [launcher for launcher in launchers() if launcher.detect(environ)]


def rank_launcher(environ: Environ) -> Launcher | None:
    """Return the launcher that has started this process as one of the run's ranks.

    If there are several, this is the innermost launcher, for example mpirun for mpirun inside a SLURM job. The result
    is None if Lightning starts the ranks.
    """
    return next((launcher for launcher in launchers() if launcher.starts_ranks(environ)), None)


def local_rank(environ: Environ) -> int:
    """Return the local rank that the innermost launcher has set, or 0 without a launcher.

    This works before Lightning has chosen a cluster environment. A local rank from an outer launcher is used only if no
    inner launcher has set one. For example, srun starts one process of mpirun on each node, and these processes all
    have the local rank 0 for srun.
    """
    numbers = (launcher.local_number(environ) for launcher in launchers())
    return next((number for number in numbers if number is not None), 0)


def process_number(environ: Environ) -> int:
    """Return the global rank that the innermost launcher has set, for example mpirun inside a SLURM job.

    Without a launcher the global rank is 0.
    """
    numbers = (launcher.number(environ) for launcher in launchers())
    return next((number for number in numbers if number is not None), 0)
