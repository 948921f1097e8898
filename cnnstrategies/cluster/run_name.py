"""What a run is called, so that whoever starts it again finds its folder.

A run with a name goes on from its last whole checkpoint; see :mod:`cnnstrategies.cluster.run_folder`. The name is, in
this order,

1. what is given as ``--run_name`` or, by a program that starts ``fit``, in the variable ``CNNSTRATEGIES_RUN_NAME``,
2. what the launchers in :data:`LAUNCHERS` offer, one after the other.

Without either nobody can start the run again; it gets a new folder, as it always has.

**A launcher adds itself** in one of two ways. One of ours, which starts the processes itself, sets
``CNNSTRATEGIES_RUN_NAME`` in their environment, the same at each start, and ``CNNSTRATEGIES_RUN_STARTS``, how often it
has started the run before; :func:`variables` makes both. For a foreign one, which sets variables of its own, write a
function that reads them and gives a :class:`Said`, and put it into :data:`LAUNCHERS`.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cnnstrategies.errors import ConfigurationError

NAME, STARTS = "CNNSTRATEGIES_RUN_NAME", "CNNSTRATEGIES_RUN_STARTS"  # Environment variables.
NOT_PART_OF_IT = ("config", "ckpt_path", "run_name", "fresh", "dry_run")  # Keys by which a restart may differ.
MOST_CHARACTERS = 120
_MADE_UP_BY_TORCHRUN = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # A UUID, as with --standalone.


@dataclass(frozen=True)
class Run:
    """A run that may be started again.

    Attributes:
        name: Stays the same then.
        starts: How often it has been started before, as far as the launchers count; None where one of them starts it
            again and does not say that it does.
    """

    name: str
    starts: int | None = 0


@dataclass(frozen=True)
class Said:
    """What a launcher says of a run that it has started.

    Attributes:
        name: What it calls the run; None where it starts it again and has no name for it.
        starts: How often it has started it before; None where it does not count.
        made_up: The name does not outlive the launcher, so one that starts the launcher again is asked first.
    """

    name: str | None
    starts: int | None = 0
    made_up: bool = False


Environment = Mapping[str, str]


def torchrun(environ: Environment, configuration: str) -> Said | None:
    """``--rdzv-id``; torchrun makes one up with ``--standalone`` and where ``--nnodes`` is 1, and else has ``none``."""
    if (name := environ.get("TORCHELASTIC_RUN_ID")) is None:
        return None
    starts = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if name == "none":
        return Said(None, starts)
    return Said(f"torchrun_{name}", starts, made_up=_MADE_UP_BY_TORCHRUN.fullmatch(name) is not None)


def kubernetes(environ: Environment, configuration: str) -> Said | None:
    """The name of the Indexed Job or the TrainJob; the host name of their pods ends with the pod's number."""
    if "KUBERNETES_SERVICE_HOST" not in environ or "JOB_COMPLETION_INDEX" not in environ:
        return None
    host, number = environ.get("HOSTNAME", ""), environ["JOB_COMPLETION_INDEX"]
    # A TrainJob's pods are those of the replicated job `node`, of which there is one.
    job = re.sub(r"-node-0$", "", host.removesuffix(f"-{number}"))
    return Said(f"kubernetes_{job}" if host.endswith(f"-{number}") else None, starts=None)


def ray(environ: Environment, configuration: str) -> Said | None:
    """The submission id of a Ray job's entry point; a plain job id is the same in each new cluster."""
    try:
        metadata = json.loads(environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("metadata") or {}
    except ValueError:
        return None
    submission = metadata.get("job_submission_id")
    # A script may train several things; that of the same configuration is the same.
    return None if submission is None else Said(f"ray_{submission}_{configuration}")


def slurm(environ: Environment, configuration: str) -> Said | None:
    """The job and its step, which are counted anew when the job is requeued.

    A job's script without srun may train several things; that of the same configuration is the same. The shell of an
    interactive job is no script: who types there does not start the same run again.
    """
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    interactive = "SLURM_PTY_PORT" in environ or environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if job is None or interactive or "SLURM_TASK_PID" not in environ:
        return None
    return Said(f"slurm_{job}_{configuration if step is None else step}", int(environ.get("SLURM_RESTART_COUNT", "0")))


LAUNCHERS: tuple[Callable[[Environment, str], Said | None], ...] = (torchrun, kubernetes, ray, slurm)


def find_run(given: str | None, configuration: str, environ: Environment) -> Run | None:
    """The run that this process is a part of; None where nobody starts it again."""
    said = [one for launcher in LAUNCHERS if (one := launcher(environ, configuration)) is not None]
    counts = [int(environ.get(STARTS, "0")), *(one.starts for one in said)]
    starts = None if None in counts else sum(count for count in counts if count is not None)
    for name, source in ((given, "run_name"), (environ.get(NAME), NAME)):
        if name is not None:
            return Run(checked(name, source), starts)
    named = sorted((one for one in said if one.name is not None), key=lambda one: one.made_up)
    if named:
        return Run(re.sub(r"[^\w.+-]", "-", str(named[0].name))[:MOST_CHARACTERS], starts)
    if environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise ConfigurationError(
            "torchrun --max-restarts without a name for the run: restarted processes would not find its checkpoints; "
            "add --run_name <name> to the options of cnnstrategies, or --rdzv-id to those of a c10d rendezvous"
        )
    return None


def checked(name: str, source: str = "run_name") -> str:
    """A name, if it can be that of a run's folder."""
    if not re.fullmatch(r"\w[\w.+-]*", name) or len(name) > MOST_CHARACTERS:
        raise ConfigurationError(
            f"{source}={name!r}: it names a folder: at most {MOST_CHARACTERS} letters, digits and . + - _ are accepted"
        )
    if re.fullmatch(r"version_\d+", name):
        raise ConfigurationError(f"{source}={name}: runs without a name are numbered so; choose another one")
    return name


def configuration_hash(config: Mapping[str, object]) -> str:
    """Eight characters that are the same for the same configuration, whichever checkpoint it starts from."""
    content = sorted((str(key), str(value)) for key, value in config.items() if key not in NOT_PART_OF_IT)
    return hashlib.sha256(repr(content).encode()).hexdigest()[:8]


def variables(name: str, starts: int = 0) -> dict[str, str]:
    """The environment variables by which a launcher names the runs that it starts."""
    return {NAME: checked(name), STARTS: str(starts)}
