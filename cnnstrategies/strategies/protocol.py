"""The interface between a strategy and the rest of this package.

:class:`StrategyFacts` lists everything that a strategy tells callbacks, data modules, the cluster code and commands.
None of them asks for a strategy's class or for an attribute that is not listed here. They call :func:`facts_of`, which
also answers for Lightning's own strategies.

This module imports no other room of the package, except the engines and the texts in
:mod:`cnnstrategies.strategies.differences`, so every room may import it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    StrategyRegistry,
)
from typing_extensions import override

from cnnstrategies.strategies.differences import RANK_ZERO, differences_of_replicas

if TYPE_CHECKING:
    from cnnstrategies.paramserver.membership import Membership
    from cnnstrategies.paramserver.worker.connections import Counters
    from cnnstrategies.pipeline.engine import Pipeline
    from cnnstrategies.shares import Deals
    from cnnstrategies.strategies.parameter_server.options import ParameterServerOptions

# How a strategy combines the gradients of its ranks:
# "equal": every rank counts alike, however many samples it has, as under DDP.
# "by_rank": each rank's mean gradient counts by the number of samples that the rank has in the step.
# "by_sample": the gradient is the mean over all samples of the global batch.
GradientWeighting = Literal["equal", "by_rank", "by_sample"]
# The work of a process in a training step: the whole network on its own batch, stages of the network, or the whole
# network with parameters that come from servers.
StepKind = Literal["replica", "stages", "worker"]


class StrategyFacts:
    """Everything that a strategy tells the rest of this package, each with a default.

    A strategy inherits from this class and from one of Lightning's strategies, in this order, and overrides what the
    defaults do not say correctly: a property by a property or by a class attribute, a method by a method. The defaults
    suit Lightning's own strategies and their subclasses.
    """

    @property
    def _described(self) -> Any:
        """The strategy that this object describes: the object itself, unless a subclass wraps a strategy."""
        return self

    # Texts

    @property
    def display_name(self) -> str:
        """Name of the strategy in the start panel.

        By default the attribute ``strategy_name`` of the strategy or of its own class, else the shortest name under
        which the class is registered, else the name of the class.
        """
        kind = type(self._described)
        attributes = {**vars(kind), **vars(self._described)}
        registered = [name for name, entry in StrategyRegistry.items() if entry["strategy"] is kind]
        return attributes.get("strategy_name") or min(registered, key=len, default=kind.__name__)

    def panel_rows(self, batch_size: int | None) -> list[tuple[str, str]]:
        """Return further rows of the start panel as pairs of a name and a text; by default none.

        Args:
            batch_size: Samples in a batch of one process; None if the number is not known.
        """
        return []

    def differences(self, batch_size: int | None) -> list[str]:
        """Return one line for each difference from a run on one device.

        The start panel shows the lines, and ``verify`` names them as possible causes. By default the lines describe
        processes that train the whole network, each on its part of the global batch.

        Args:
            batch_size: As in :meth:`panel_rows`.
        """
        strategy = self._described
        module: LightningModule | None = strategy.lightning_module
        if module is None:
            return []
        processes = strategy.world_size if isinstance(strategy, ParallelStrategy) else 1
        statistics = RANK_ZERO if isinstance(strategy, DDPStrategy) else "each process's own"
        return differences_of_replicas(module, processes, batch_size, statistics)

    # Processes and hosts

    @property
    def environment(self) -> ClusterEnvironment | None:
        """Lightning's description of the run's processes; None for a strategy of one process.

        The cluster code brings the hosts together with it, and checks the number of processes that were started.
        """
        return self._described.cluster_environment if isinstance(self._described, ParallelStrategy) else None

    @property
    def host_count(self) -> int:
        """Number of hosts; on one host torch is told to listen on the loopback interface only."""
        return int(getattr(self._described, "num_nodes", 1))

    @property
    def connects_hosts(self) -> bool:
        """Whether the strategy brings its hosts together itself, so that the command line opens no store for them."""
        return False

    def set_host_timeout(self, seconds: float) -> None:
        """Set how long to wait for other hosts at the start of a run; called only if `connects_hosts` is true."""

    # Job checks of ``submit``

    def check_job(self, module: LightningModule, processes: int) -> None:
        """Refuse a module that the strategy cannot train on a number of processes; by default accept all.

        Raises:
            ConfigurationError: The strategy cannot train the module so.
        """

    def loading_processes(self, processes: int) -> int:
        """Return how many of the processes load data; by default all of them."""
        return processes

    @property
    def server_options(self) -> "ParameterServerOptions | None":
        """Options of the parameter servers; None for a strategy without servers."""
        return None

    # Network and data

    @property
    def compiles_network(self) -> bool:
        """Whether the strategy compiles the network or its parts, so that modules and callbacks must not compile it."""
        return False

    @property
    def shards_parameters(self) -> bool:
        """Whether each rank holds only pieces of the parameter tensors, so that no rank can read or prune them."""
        strategy = self._described
        if isinstance(strategy, DeepSpeedStrategy):
            return strategy.zero_stage_3
        return isinstance(strategy, FSDPStrategy | ModelParallelStrategy)

    @property
    def parameters_per_device(self) -> Sequence[int] | None:
        """Numbers of parameters that devices hold, where devices hold different ones; None for all other strategies."""
        return None

    @property
    def batch_shares(self) -> "Deals | None":
        """The ranks' shares of a global batch, by which data modules cut batches; None for equal shares."""
        return None

    @property
    def gradient_weighting(self) -> GradientWeighting:
        """How the gradients of the ranks are combined.

        The callback ``SampleWeights`` scales each loss by what is missing for a mean over samples, and data modules
        refuse batches of unequal sizes if nothing scales their losses.
        """
        return "equal"

    # Training steps

    @property
    def step_kind(self) -> StepKind:
        """The work of a process in a training step; ``StepProfile`` and ``scaling`` split the step's time by it."""
        return "replica"

    @property
    def pipeline(self) -> "Pipeline | None":
        """The engine that runs the stages of the network; None if there are no stages, or before the set-up."""
        return None

    @property
    def traffic(self) -> "Counters | None":
        """Bytes and steps of this worker, and its seconds of waiting for servers; None if there are no servers."""
        return None

    @property
    def membership(self) -> "Membership | None":
        """This worker's membership, which knows all workers and servers of the run; None outside a session."""
        return None

    @property
    def joined_late(self) -> bool:
        """Whether this process joined when the others were training already, until its first batch begins.

        The other processes do not wait for a late joiner in the checks of the first batch.
        """
        return False

    @property
    def may_skip_steps(self) -> bool:
        """Whether the others may make a step without this worker; ``ServerTraffic`` then logs the skipped part."""
        return False

    @property
    def steps_in_lockstep(self) -> bool:
        """Whether all processes make the same steps at the same time, and so may wait for each other after a step."""
        return True

    # Stopping

    def requested_stop(self) -> int | None:
        """Return the signal that a process other than the ranks, such as a server, has received; None if there is none.

        All processes of the run must return the same signal sooner or later; ``GracefulStop`` asks after steps.
        """
        return None

    def agree_on_stop(self, received: int | None) -> int | None:
        """Return the signal after which this process stops now, without waiting for other processes; None to go on.

        Only called if `steps_in_lockstep` is false. By default each process stops for itself.

        Args:
            received: The signal that this process has received; None if it has received none.
        """
        return received


class _WrappedFacts(StrategyFacts):
    """Facts of a strategy whose class does not inherit from `StrategyFacts`, such as Lightning's own strategies."""

    def __init__(self, strategy: Any) -> None:
        self._wrapped = strategy

    @property
    @override
    def _described(self) -> Any:
        return self._wrapped


def facts_of(strategy: Any) -> StrategyFacts:
    """Return what a strategy tells the rest of this package.

    Args:
        strategy: A strategy of this package, of Lightning or of a user. If its class does not inherit from
            :class:`StrategyFacts`, the defaults hold.
    """
    return strategy if isinstance(strategy, StrategyFacts) else _WrappedFacts(strategy)
