"""A DDP strategy whose ranks meet at a coordinator instead of a torch process group."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, Self

from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed import ReduceOp
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.membership import STOP
from cnnstrategies.paramserver.supervision import Supervision
from cnnstrategies.strategies.keywords import check_keywords
from cnnstrategies.strategies.metric_states import own_metric_states
from cnnstrategies.strategies.parameter_server.group import WorkerGroup
from cnnstrategies.strategies.parameter_server.launcher import WatchingProcessLauncher, WatchingScriptLauncher
from cnnstrategies.strategies.parameter_server.options import Options
from cnnstrategies.strategies.parameter_server.run import WAIT, Layout, open_supervision
from cnnstrategies.strategies.parameter_server.sessions import SESSIONS
from cnnstrategies.strategies.resumable import check_optimizer_states, warn_of_weights_alone


class CoordinatedStrategy(DDPStrategy):
    """Starts and watches the processes of a run, and serves the collectives that Lightning asks for.

    Args:
        options: What the user asks for.
        start_method: How ranks are started.
        **kwargs: Those of :class:`~lightning.pytorch.strategies.DDPStrategy` for devices.

    Attributes:
        options: What the user asks for.
        group: The workers of the run.
        wait: Seconds in which all processes must be there; on the command line ``network.wait``.
    """

    finds_hosts = True  # Its coordinator knows who is there.
    wait = WAIT

    def __init__(self, options: Options, start_method: Literal["popen", "spawn", "fork"], **kwargs: Any) -> None:
        check_keywords(type(self).__name__, kwargs)
        super().__init__(start_method=start_method, timeout=timedelta(seconds=options.timeout), **kwargs)
        self.options = options
        self.group = WorkerGroup()
        self._start = start_method
        self._services: Supervision | None = None
        self._interrupted = False

    def __deepcopy__(self, memo: Any) -> Self:
        """This strategy itself: weight averaging copies the module with its trainer, but the run stays one."""
        return self

    # Processes

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start == "popen":
            self._launcher = WatchingScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes, self.options, self._layout
            )
        else:
            self._launcher = WatchingProcessLauncher(self, self._start, self.options, self._layout)

    def _layout(self) -> Layout:
        environment = self.cluster_environment
        assert environment is not None
        address, port = environment.main_address, environment.main_port
        return Layout(self.num_nodes, self.node_rank, self.num_processes, address, port, self.wait)

    @override
    def setup_distributed(self) -> None:
        """Register with the coordinator; there is no torch process group."""
        assert self.lightning_module is not None
        reset_seed()
        self.set_world_ranks()
        own_metric_states(self.lightning_module)
        if not self.group.is_open:
            self.open_session()

    def open_session(self) -> None:
        """Register with the coordinator of the next session.

        Raises:
            RunEnded: A rank has died in the session before.
            ConfigurationError: The session would need dedicated servers that have ended.
        """
        assert self.lightning_module is not None
        self._interrupted = False
        training = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        place = SESSIONS.open(self.options, self._layout, training)
        if not place.supervised and self.local_rank == 0:
            self._services = open_supervision(self.options, self._layout(), place, training, "program")
        self.group.open(self.options, place, self.global_rank, self.world_size)

    def stop_signal(self, received: int | None) -> int | None:
        """Agree on a stop without waiting for each other; from then on this worker acts alone.

        Args:
            received: The signal that this rank has received, if any.

        Returns:
            The signal that some rank has received.
        """
        return self.group.agree_to_stop(received)

    def stop_asked(self) -> int | None:
        """The signal that some other process of the run has received and told all, such as a server."""
        return self.group.membership.announced(STOP) if self.group.is_open else None

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self.group.is_open and isinstance(exception, Exception) and not isinstance(exception, RunEnded):
            reason = f"{type(exception).__name__}: {exception}"
            self.group.membership.end(f"worker {self.global_rank} failed: {reason}")
        self._interrupted = True
        super().on_exception(exception)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        warn_of_weights_alone(checkpoint, filepath, self._launcher, self._start)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        check_optimizer_states(len(checkpoint["optimizer_states"]), len(self.optimizers))
        super().load_optimizer_state_dict(checkpoint)

    @override
    def teardown(self) -> None:
        self.leave_session()
        super().teardown()

    def leave_session(self) -> None:
        """Leave the coordinator; a second time does nothing."""
        if self.group.is_open:
            SESSIONS.lost = self.group.absent()
        self.group.close()
        if self._services is not None:
            self._services.stop(at_once=self._interrupted)
        self._services = None

    # Collectives

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.group.gather(None, str(args[0]) if args and args[0] else "barrier")

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of one rank, on all; nothing is pickled."""
        return self.group.broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Combine a tensor over the workers that are there."""
        return self.group.reduce(tensor, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all workers that are there, stacked along a new first dimension."""
        if sync_grads:
            raise ConfigurationError("all_gather(sync_grads=True): workers exchange no gradients of activations")
        return self.group.all_gather(tensor)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all workers, or any, have decided so."""
        return self.group.decide(decision, all)
