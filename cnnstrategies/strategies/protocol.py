"""The interface between a strategy and the rest of this package.

:class:`StrategyFacts` has a property or method for everything that callbacks, data modules, the cluster code and
commands need to know about a strategy. They call :func:`facts_of`, which also works for Lightning's own strategies, and
never check the class of a strategy.

All subpackages may import this module. To avoid circular imports, the module itself imports only
:mod:`cnnstrategies.strategies.differences` from this package at run time.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)
from typing_extensions import override

from cnnstrategies.strategies.differences import RANK_ZERO, differences_of_replicas

if TYPE_CHECKING:
    from torch import Tensor

    from cnnstrategies.paramserver.membership import Membership
    from cnnstrategies.paramserver.worker.counters import Counters
    from cnnstrategies.pipeline.task_times import TaskTimes
    from cnnstrategies.planning.lighter import LighterPlan
    from cnnstrategies.planning.memory import PeakMemory
    from cnnstrategies.shares.history import ShareHistory
    from cnnstrategies.strategies.parameter_server.options import ParameterServerOptions

# How a strategy combines the gradients of its ranks:
# "equal": the result is the mean of the ranks' gradients. All ranks have the same weight, as under DDP.
# "by_rank": the result is a weighted mean. The weight of a rank is the rank's number of samples in the step.
# "by_sample": the result is the mean over all samples of the global batch.
GradientWeighting = Literal["equal", "by_rank", "by_sample"]
# What a process computes in a training step:
# "replica": the whole network, on the process's own batch.
# "stages": one or more stages of the network, as in a pipeline.
# "worker": the whole network, with parameters from servers.
# "parts": the whole network, on the process's part of each image.
StepKind = Literal["replica", "stages", "worker", "parts"]
T = TypeVar("T")
FINDING = 1000  # In place of a signal: the callback Guard stops all processes.


class StrategyFacts:
    """Facts about a strategy that the rest of this package needs.

    Each fact is a property or a method. The defaults are correct for Lightning's own strategies. A strategy of this
    package inherits from this class and from one of Lightning's strategies, in this order, and overrides facts whose
    defaults are not correct for the strategy. A class attribute may override a property.
    """

    @property
    def _described(self) -> Any:
        """The strategy that this object describes, which is this object itself except in `_WrappedFacts`."""
        return self

    # Texts about the strategy

    @property
    def display_name(self) -> str:
        """Name of the strategy in the start panel.

        By default this is the attribute ``strategy_name`` of the instance or of its class, but not of a base class. If
        the attribute is missing, the display name is the shortest name under which the class is registered. If the
        class is not registered, the display name is the name of the class.
        """
        kind = type(self._described)
        attributes = {**vars(kind), **vars(self._described)}
        registered = [name for name, entry in StrategyRegistry.items() if entry["strategy"] is kind]
        return attributes.get("strategy_name") or min(registered, key=len, default=kind.__name__)

    def panel_rows(self, batch_size: int | None) -> list[tuple[str, str]]:
        """Return the strategy's rows of the start panel, as pairs of a name and a text.

        By default there are no rows.

        Args:
            batch_size: Number of samples in a batch of one process; None if the number is not known.
        """
        return []

    def differences(self, batch_size: int | None) -> list[str]:
        """Return one line of text for each difference from a run on one device.

        The start panel shows the lines, and ``verify`` shows them as possible causes of different results. The default
        is correct for data parallelism, in which each process trains the whole network on its part of the global batch.

        Args:
            batch_size: Number of samples in a batch of one process; None if the number is not known.
        """
        strategy = self._described
        module: LightningModule | None = strategy.lightning_module
        if module is None:
            return []
        processes = strategy.world_size if isinstance(strategy, ParallelStrategy) else 1
        statistics = RANK_ZERO if isinstance(strategy, DDPStrategy) else "each process's own"
        return differences_of_replicas(module, processes, batch_size, statistics, weighted=strategy is self)

    # Processes and hosts of the run

    @property
    def environment(self) -> ClusterEnvironment | None:
        """Lightning's cluster environment, which describes the run's processes.

        The value is None for a strategy that trains with a single process.

        The cluster code uses the environment to connect the hosts, and to check how many processes were started.
        """
        return self._described.cluster_environment if isinstance(self._described, ParallelStrategy) else None

    def update_ranks(self) -> None:
        """Write the rank of this process into the cluster environment.

        In a forked rank, the environment has the rank of the parent process before.
        """
        set_ranks = getattr(self._described, "set_world_ranks", None)
        if set_ranks is not None:
            set_ranks()

    @property
    def host_count(self) -> int:
        """Number of hosts of the run. If the number is 1, the cluster code makes torch listen on loopback only."""
        return int(getattr(self._described, "num_nodes", 1))

    @property
    def only_starts_ranks(self) -> bool:
        """Whether this process is not a rank, and starts all ranks of its host by running the same program again."""
        return False

    @property
    def connects_hosts(self) -> bool:
        """Whether the strategy connects its hosts itself. If not, the cluster code connects them with a torch store."""
        return False

    def set_host_timeout(self, seconds: float) -> None:
        """Set how long, in seconds, this host waits for the other hosts at the start of a run.

        The cluster code calls this method only if `connects_hosts` is True.
        """

    # Data

    def keeps_sampler(self, loader: Any) -> bool:
        """Whether Lightning must keep a loader's sampler, because the user's code has divided the data already.

        Lightning otherwise replaces the sampler by a ``DistributedSampler``. All ranks must call this method.

        Args:
            loader: A torch DataLoader.
        """
        return False

    @property
    def has_global_batches(self) -> bool:
        """Whether every rank runs the steps with the whole global batch, and not with its own part of the batch."""
        return False

    @property
    def has_layers_of_one_device(self) -> bool:
        """Whether dropout and batch normalisation draw and measure in each step what they do on one device."""
        return False

    @property
    def ranks_per_batch(self) -> int:
        """Number of consecutive ranks that run a step together with the same batch, which counts once."""
        return 1

    # Checks by the command ``submit``

    def check_job(self, module: LightningModule, processes: int) -> None:
        """Check whether the strategy can train a module on a number of processes.

        By default all modules are accepted.

        Raises:
            ConfigurationError: The strategy cannot train the module on this number of processes.
        """

    def loading_processes(self, processes: int) -> int:
        """Return the number of processes that load data, in a run of `processes` processes.

        By default all processes load data.
        """
        return processes

    @property
    def server_options(self) -> "ParameterServerOptions | None":
        """Options of the parameter servers. The value is None for a strategy without servers."""
        return None

    # Network and data

    @property
    def compiles_network(self) -> bool:
        """Whether the strategy compiles the network or its parts. If so, modules and callbacks must not compile it."""
        return False

    @property
    def shards_parameters(self) -> bool:
        """Whether each rank holds only shards of the parameters, so that no rank can read or prune whole parameters."""
        strategy = self._described
        if isinstance(strategy, DeepSpeedStrategy):
            return strategy.zero_stage_3
        return isinstance(strategy, FSDPStrategy | ModelParallelStrategy)

    @property
    def parameters_per_device(self) -> Sequence[int] | None:
        """Number of parameters on each device.

        The value is None unless devices hold different parameters.
        """
        return None

    @property
    def predicted_peaks(self) -> "Sequence[PeakMemory]":
        """Predicted peak memory of each rank in a training step, in rank order.

        The sequence is empty unless the strategy has planned its layout. `strategies.predicted_memory` predicts the
        peaks of strategies whose ranks have the whole network.
        """
        return ()

    @property
    def lighter_plans(self) -> "Sequence[LighterPlan]":
        """Plans that need less memory than :attr:`predicted_peaks`, those that change the step least first."""
        return ()

    @property
    def gradient_buckets(self) -> float | None:
        """Size of the buffers from which gradients are sent, as a multiple of the gradients' size.

        The value is None if it is not known, and if ranks do not hold the whole network.
        """
        strategy = self._described
        if isinstance(strategy, DDPStrategy):
            return 1.0 if strategy.world_size > 1 else 0.0
        return 0.0 if isinstance(strategy, SingleDeviceStrategy) else None

    @property
    def image_division(self) -> tuple[int, int | None] | None:
        """Number of devices that each have a part of the same images, and the dimension of images that is divided.

        The dimension is counted from the last one, and None for the longest one. The value is None if each device has
        whole images.
        """
        return None

    @property
    def batch_shares(self) -> "ShareHistory | None":
        """Shares by which data modules divide global batches among the ranks.

        The value is None if all ranks get equal shares.
        """
        return None

    @property
    def divides_by_shares(self) -> bool:
        """Whether the strategy's options let ranks get different numbers of samples of a batch.

        If so, the callback ``SampleWeights`` refuses losses for which unequal shares are wrong.
        """
        return False

    @property
    def gradient_weighting(self) -> GradientWeighting:
        """How the strategy combines the gradients of the ranks.

        The callback ``SampleWeights`` reads this value, and scales gradients so that the result is a mean over all
        samples. If the value is "equal" and the run does not have this callback, data modules refuse to divide a global
        batch into batches of different sizes.
        """
        return "equal"

    # Training steps

    @property
    def step_kind(self) -> StepKind:
        """Kind of work of a process in a training step.

        The kind determines the parts of a step for which ``StepProfile`` and ``scaling`` report times.
        """
        return "replica"

    @property
    def pipeline(self) -> "TaskTimes | None":
        """The pipeline that runs the network's stages, and whose spans can be measured.

        The value is None for a strategy without stages, and before `setup`.
        """
        return None

    @property
    def traffic(self) -> "Counters | None":
        """Counters of the bytes that this worker sends and receives, of its steps, and of its waiting for servers.

        The value is None for a run without servers.
        """
        return None

    @property
    def membership(self) -> "Membership | None":
        """This worker's membership of a run with servers.

        The value is None for other strategies, and while no session is open.
        """
        return None

    @property
    def joined_late(self) -> bool:
        """Whether this process has joined a run that was training already, and has not begun its first batch.

        The processes of a run compare their data before their first batch. The original processes have done this
        already, so a process that joins late must not start the comparison.
        """
        return False

    @property
    def may_skip_steps(self) -> bool:
        """Whether other workers may make a step without this worker.

        ``ServerTraffic`` then logs the fraction of steps that this worker has skipped.
        """
        return False

    @property
    def steps_in_lockstep(self) -> bool:
        """Whether all processes make each step together, so that they may wait for each other after a step."""
        return True

    # Values of the ranks

    def on_all_ranks(self, values: T) -> T:
        """Return values with copies of small tensors on all ranks, if only some ranks have the tensors.

        All ranks must call this. Metrics and loggers need the values of a step on all ranks. A module that asks for all
        of them together saves messages. The copies have no gradient. By default all ranks have all values already.

        Args:
            values: Nested containers of tensors.
        """
        return values

    # Values of the ranks, for the callback ``Guard``

    @property
    def replicas_agree(self) -> bool:
        """Whether the ranks that hold a weight have the same value of it after each step, and take the same step."""
        return not self.shards_parameters

    @property
    def divides_values(self) -> bool:
        """Whether the outputs of layers are divided among ranks, so that one rank alone cannot compute a layer."""
        return False

    def holders_of(self, tensor: "Tensor") -> tuple[int, ...] | None:
        """Return the ranks that hold the values of a parameter, a buffer or another tensor; None if all ranks do."""
        return None

    def local_code(self) -> AbstractContextManager[None]:
        """Return a context for code that reads the tensors that this rank holds, and need not run on all ranks."""
        return nullcontext()

    def settle_weights(self) -> None:
        """Bring the weights of this rank up to date after a step. All ranks that step together must call this."""

    def gather_from_ranks(self, values: "Tensor") -> "Tensor":
        """Return tensors of all ranks, whose values may differ, such as measured times. All ranks must call this.

        Under a strategy whose ranks all run the whole step, ``all_gather`` of the strategy itself returns the argument.

        Args:
            values: Tensor of this rank (...), of the same shape on all ranks.

        Returns:
            The tensors of all ranks in rank order (ranks, ...). If the connections of the ranks are already closed, the
            tensor of this rank is the only one.
        """
        strategy = self._described
        gathered: Tensor = strategy.all_gather(values)
        ranks = gathered.numel() // values.numel() if values.numel() else getattr(strategy, "world_size", 1)
        return gathered.reshape(ranks, *values.shape)

    # Stopping of the run

    def fail_together(self, point: str, seconds: float, exception: BaseException) -> bool:
        """Return whether all ranks have failed at the same point of the run, and so can save a checkpoint together.

        A failed rank calls this method once. It is called only for strategies without a process group. By default the
        ranks cannot save a checkpoint.

        Args:
            point: Text for the point of the run at which this rank has failed.
            seconds: Longest time to wait for the other ranks.
            exception: The exception of this rank.
        """
        return False

    def requested_stop(self) -> int | None:
        """Return a stop signal that another process of the run, such as a server, has received.

        Return None if no other process has received a stop signal.

        If one rank returns a signal, all other ranks must return the same signal sooner or later. The callback
        ``GracefulStop`` calls this method after steps.
        """
        return None

    def agree_on_stop(self, received: int | None) -> int | None:
        """Return the signal because of which this process must stop now. Return None if the process must continue.

        This method is called only if `steps_in_lockstep` is False, because the processes then do not stop in the same
        step. By default each process stops after its own signal.

        Args:
            received: The signal that this process has received, or `FINDING`; None if it has received none.
        """
        return received


class _WrappedFacts(StrategyFacts):
    """Facts about a strategy whose class does not inherit from `StrategyFacts`, such as a strategy of Lightning.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: Any) -> None:
        self._wrapped = strategy

    @property
    @override
    def _described(self) -> Any:
        return self._wrapped


def facts_of(strategy: Any) -> StrategyFacts:
    """Return the facts about a strategy.

    Args:
        strategy: A strategy of this package, of Lightning or of a user. If its class does not inherit from
            :class:`StrategyFacts`, all facts have their defaults.
    """
    return strategy if isinstance(strategy, StrategyFacts) else _WrappedFacts(strategy)
