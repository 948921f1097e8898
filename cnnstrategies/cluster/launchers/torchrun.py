"""Launcher for torchrun, which starts the ranks on each machine and may restart them."""

import re

from typing_extensions import override

from cnnstrategies.cluster.launchers.launcher import Environ, Launcher
from cnnstrategies.cluster.launchers.registry import register

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment

RUN_ID = "TORCHELASTIC_RUN_ID"
NO_ID = "none"  # Value of the environment variable with torchrun's id if the option --rdzv-id is not set.
# Pattern of ids with a random UUID. torchrun creates such an id, for example with --standalone.
INVENTED_NAME = re.compile(r"torchrun_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@register
class Torchrun(Launcher):
    """Launcher for torchrun. It comes before all other launchers, because torchrun may run inside their jobs."""

    name = "torchrun"
    title = "torchrun"
    precedence = 10
    program = "torchrun"
    rank_variable, size_variable = "RANK", "WORLD_SIZE"
    local_rank_variable, local_size_variable = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    variables = ("TORCHELASTIC_*", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    lightning_detects = lightning_knows = True

    @override
    def detect(self, environ: Environ) -> bool:
        return RUN_ID in environ

    @override
    def starts_ranks(self, environ: Environ) -> bool:
        return self.detect(environ)

    @override
    def environment(self) -> "ClusterEnvironment":
        from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

        return TorchElasticEnvironment()

    @override
    def nodes(self, environ: Environ) -> int:
        return int(environ["GROUP_WORLD_SIZE"])

    @override
    def launch_id(self, environ: Environ) -> str | None:
        run_id = environ.get(RUN_ID, NO_ID)
        return None if run_id == NO_ID else run_id

    @override
    def start_command(self, nodes: int, devices: int) -> str:
        return f"torchrun --nnodes={nodes} --nproc-per-node={devices}"

    @override
    def run_name(self, environ: Environ, configuration: str) -> str | None:
        """Return a run name that contains the value of torchrun's option ``--rdzv-id``.

        If this option is not set, torchrun has no id, or creates a random id.
        """
        run_id = environ.get(RUN_ID, NO_ID)
        return None if run_id == NO_ID else f"torchrun_{run_id}"

    @override
    def is_temporary(self, run_name: str) -> bool:
        return INVENTED_NAME.fullmatch(run_name) is not None

    @override
    def lacks_name(self, environ: Environ) -> str | None:
        if environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
            return None
        return (
            "torchrun --max-restarts needs a name for the run, because restarted processes could not find the run's "
            "checkpoints: add --run_name <name> to the options of cnnstrategies, or --rdzv-id <name> with "
            "--rdzv-backend=c10d to those of torchrun"
        )
