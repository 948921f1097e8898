"""Base class of the strategies that use a process group of ``torch.distributed``."""

import signal

from lightning.pytorch.strategies import DDPStrategy
from torch.distributed import DistStoreError
from typing_extensions import override

from cnnstrategies._lightning_private import ScriptLauncher
from cnnstrategies.cluster.claimed_processes import check_processes
from cnnstrategies.cluster.rendezvous import mark_launch, ranks_meet
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.compiling import renew_thread_pool
from cnnstrategies.strategies.notebooks import check_interactive
from cnnstrategies.strategies.pickling import explain_pickling


class MeetingDDPStrategy(DDPStrategy):
    """DDP strategy whose ranks connect only to ranks of their own run, also in a script without the command line."""

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        check_processes(self.cluster_environment, self.num_nodes, self.num_processes)
        mark_launch(self)
        check_interactive(self, self._launcher)
        explain_pickling(self._launcher, self._start_method, self.root_device)

    @override
    def setup_environment(self) -> None:
        renew_thread_pool()  # A user's own module may be compiled.
        try:
            with ranks_meet(self):
                super().setup_environment()
        except BaseException as error:
            # The ranks that this process has started do not watch it yet. They would wait for it, or stay stopped.
            if isinstance(self._launcher, ScriptLauncher):
                self._launcher.kill(signal.SIGKILL)
            if not isinstance(error, DistStoreError):
                raise
            raise ConfigurationError(
                f"the ranks have not met: {str(error).splitlines()[0].rstrip('.')}: look for errors in the output of "
                "the missing ranks, or give the ranks more time with the strategy's option `timeout`"
            ) from error
