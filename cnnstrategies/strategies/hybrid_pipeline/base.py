"""Base class of pipeline strategies: options, numbering of the ranks, loading ranks, collectives, and failures."""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from torch.utils.data import DataLoader
from typing_extensions import override

from cnnstrategies._lightning_private import check_start, keep_batches, leave_samplers, ranks_are_children
from cnnstrategies.old_names import refuse_old_names
from cnnstrategies.pipeline.microbatches import CPU
from cnnstrategies.pipeline.timetable import Checkpointing, Order, Placement, Schedule
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.placed import DivergedError, Places
from cnnstrategies.quantities import Duration, Size, as_timedelta
from cnnstrategies.runtime.generator_states import GeneratorStates
from cnnstrategies.runtime.groups import PeerError, broadcast_value, cpu_group, gather_rows, gather_tensors
from cnnstrategies.runtime.processes import end_group_at_exit, failed_before, leave_group_at_exit
from cnnstrategies.shares.history import ShareHistory
from cnnstrategies.strategies.failing import FailingTogetherDDPStrategy
from cnnstrategies.strategies.hybrid_pipeline.checks import check_devices
from cnnstrategies.strategies.hybrid_pipeline.chosen_network import ChosenNetwork
from cnnstrategies.strategies.hybrid_pipeline.connections import RunConnections, everywhere
from cnnstrategies.strategies.hybrid_pipeline.layout import LayoutRequest
from cnnstrategies.strategies.hybrid_pipeline.loading_ranks import LoadingRanks, warn_of_shares
from cnnstrategies.strategies.hybrid_pipeline.stage_shares import begin_shares
from cnnstrategies.strategies.protocol import GradientWeighting, StepKind, StrategyFacts
from cnnstrategies.strategies.share_options import by_shares
from cnnstrategies.strategies.streams import divide_stream
from cnnstrategies.strategies.without_ddp import check_keywords, own_metric_states


class PipelineStrategy(StrategyFacts, FailingTogetherDDPStrategy):
    """Base class of strategies that cut the network into stages, each of which may have several replicas.

    Args:
        stages: Number of stages. By default it follows from ``replicas`` or ``cuts``; without both it is 2.
        replicas: Number of replicas of each stage, such as ``[3, 1]``. By default all devices are divided evenly among
            the stages.
        cuts: Names of the modules after which the network is cut. By default the network is profiled when the run
            starts, and the cuts with the smallest predicted step time are chosen.
        microbatches: Number of microbatches of a global batch. The default is 4 times the number of stages times the
            largest number of replicas. If the network has batch normalisation and the batch size is known, the default
            is lowered until each microbatch has at least 8 samples.
        schedule: Order of the forward and backward passes. ``1f1b`` runs the backward pass of a microbatch as soon as
            possible, if the module has a method ``loss(outputs, targets)`` that ``training_step`` calls. The first step
            and other modules run in the order ``gpipe``, which runs all forward passes first, and stores the
            activations of all microbatches.
        run_ahead: Whether stages under ``1f1b`` store the activations of one more microbatch than necessary, so that
            messages are sent during computation. If the cuts are chosen automatically, the default is true if the
            profile predicts that this saves time and fits into ``memory_limit``. With ``cuts`` or one stage, the
            default is true if there is no ``memory_limit``.
        memory_limit: Largest memory of a device for automatic cuts: a number of bytes, a size such as ``8GiB``, or a
            list with a size for each rank.
        activation_checkpointing: Whether activations are computed again in the backward, which saves memory:
            ``never``, ``always``, or ``except_last`` for all microbatches except the last of each rank. By default
            activations are computed again only if the cuts are chosen automatically and the profile predicts that no
            cuts fit into ``memory_limit`` otherwise.
        placement: Order in which ranks are numbered, which decides which ranks are on one node. ``stages`` puts the
            replicas of a stage, which sum their gradients, on the same node. ``replicas`` puts ranks that send each
            other activations on the same node.
        shares: Division of the microbatches among the replicas of each stage, with one number above 0 for each rank.
            With ``replicas: [2, 1]`` and ``[3, 1, 1]``, the first rank runs three of four microbatches of the first
            stage. ``equal`` gives all replicas of a stage the same number. ``auto`` begins with ``initial_shares`` and
            measures each rank's time for a microbatch; whenever other shares would make a step more than 3 % faster,
            the shares are rebalanced.
        initial_shares: The shares with which ``auto`` begins: ``equal``, or a list as for ``shares``. The command
            ``plan`` writes such a list.
        submodule: Path of the submodule that is divided, such as ``model``. By default it is the submodule that has all
            of the module's parameters.
        timeout: Longest time to wait for another rank: seconds, ``minutes:seconds`` or a timedelta.
        **kwargs: Options of :class:`~lightning.pytorch.strategies.DDPStrategy` for devices and launching.

    Raises:
        ConfigurationError: Options contradict each other. Options that do not fit the devices or the module are refused
            before processes are started.
    """

    gradient_weighting: GradientWeighting = "by_sample"
    compiles_network = True
    step_kind: StepKind = "stages"

    def __init__(
        self,
        stages: int | None = None,
        replicas: list[int] | None = None,
        cuts: list[str] | None = None,
        microbatches: int | None = None,
        schedule: Schedule = "1f1b",
        run_ahead: bool | None = None,
        memory_limit: Size | list[Size] | None = None,
        activation_checkpointing: Checkpointing | None = None,
        placement: Order = "stages",
        shares: Literal["auto", "equal"] | list[float] = "equal",
        initial_shares: Literal["equal"] | list[float] = "equal",
        submodule: str | None = None,
        process_group_backend: str | None = None,
        timeout: Duration = 600.0,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        limit = as_timedelta(timeout, "timeout")
        refuse_old_names(type(self), kwargs)
        check_keywords(type(self).__name__, kwargs)
        super().__init__(
            process_group_backend=process_group_backend, timeout=limit, start_method=start_method, **kwargs
        )
        self.time_limit = limit
        self._chosen = ChosenNetwork(LayoutRequest.of(locals()), submodule, start_method)
        self._connections: RunConnections | None = None
        self._history: ShareHistory | None = None
        self._failed = False
        self._in_parts = False  # Whether a run has failed, and each rank has the values of its own stage alone.
        self._made_in = os.getpid()  # Process that has created this object.
        # The last loader, and the ranks that load its data.
        self._examined: tuple[object, LoadingRanks] | None = None

    @property
    def request(self) -> LayoutRequest:
        """The options that say how the network is divided."""
        return self._chosen.request

    # Before the processes start

    @property
    @override
    def launcher(self) -> Any:
        """Lightning's launcher. Before the launcher starts processes, the module and the options are checked."""
        launcher = super().launcher
        # After a failure, Lightning reads this property to end the ranks.
        if not self._in_parts:
            if os.getpid() == self._made_in and ranks_are_children(launcher):  # Ranks start no processes.
                check_start(self._start_method, self.root_device)
            self._check(before_setup=True)
        return launcher

    def _check(self, before_setup: bool = False) -> None:
        """Refuse a module or options with which this strategy cannot train.

        Args:
            before_setup: Whether the processes have not been started. What only the ranks know is checked later.

        Raises:
            ConfigurationError: The strategy cannot train.
        """
        if self.lightning_module is not None:
            check_devices(self.root_device, self.process_group_backend, self._layer_sync is not None)
            devices = self.num_nodes * self.num_processes
            self._chosen.check(self.lightning_module, devices, self.root_device, before_setup)

    @override
    def check_job(self, module: LightningModule, processes: int) -> None:
        self._chosen.check_job(module, processes)

    # Devices and data

    @property
    def placement(self) -> Placement:
        """Numbering of the ranks."""
        return self.request.placement_on(self.num_nodes * self.num_processes)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of Lightning's sampler. The replicas of the first stage divide the samples."""
        place = self.placement.place(self.global_rank)
        return {"num_replicas": self.placement.replicas[0], "rank": 0 if place.stage else place.replica}

    @override
    def keeps_sampler(self, loader: DataLoader[Any]) -> bool:
        """Whether the user's code has divided a loader's data among all ranks. All ranks must call this."""
        return bool(self._loading_ranks(loader).all_load)

    def _loading_ranks(self, loader: object) -> LoadingRanks:
        """Return the ranks that load a loader's data. All ranks must call this."""
        if self._examined is None or self._examined[0] is not loader:
            ranks = LoadingRanks(loader, self.placement, self.global_rank, self._gather, self._transport)
            self._examined = loader, ranks
        return self._examined[1]

    def _by_shares(self, loader: Any, ranks: LoadingRanks) -> Any:
        """Return a training loader whose batches the replicas of the first stage divide by their shares."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self._history is not None and self.placement.replicas[0] > 1:
            if not ranks.all_load:
                return by_shares(loader, trainer, self._history)
            if trainer.training:
                warn_of_shares(loader)
        return loader

    @property
    @override
    def batch_shares(self) -> ShareHistory | None:
        return self._history

    def loads(self, shares: Sequence[float]) -> tuple[float, ...]:
        """Return the shares by which the replicas of the first stage load, from the shares of all ranks."""
        microbatches = self._chosen.layout.microbatches
        return replace(self.placement, microbatches=microbatches, shares=tuple(shares)).loads

    # Set-up

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        existed = dist.is_initialized()
        states = GeneratorStates.current(CPU)
        super().setup_environment()
        if self._start_method not in ("spawn", "forkserver"):
            # Lightning has set the generators to the seed of `seed_everything`. On one device the run continues with
            # the random numbers that follow those of the module and the data. New processes do not have their states.
            states.restore(CPU)
        own_metric_states(self.lightning_module)
        keep_batches(self.lightning_module.trainer, divide_stream)
        if self.placement.replicas[0] == 1:
            leave_samplers(self.lightning_module.trainer)  # Lightning's sampler would shuffle ordered data.
        if not existed:
            end_group_at_exit()
        self._history = begin_shares(self, self.lightning_module.trainer, self._gather)
        # Loaders, which may be asked for before the set-up, need the rules.
        self._connections = RunConnections(self.global_rank, self.world_size, self.root_device, self.time_limit)

    @property
    def places(self) -> Places | None:
        """The rules of this rank for tensors that only some ranks have; None outside of a run."""
        return None if self._connections is None else self._connections.places

    @property
    def _connected(self) -> RunConnections:
        assert self._connections is not None, "the processes have been started"
        return self._connections

    def _transport(self) -> Transport:
        """Return the connections of this rank, after the set-up."""
        return self._connected.transport

    # Collectives

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any of them, have decided so. All ranks must call this."""
        return bool(self._most(int(not decision)) == 0 if all else self._most(int(decision)))

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with nullcontext() if self._connections is None else self._connections.all_processes():
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of one rank, on all ranks, without pickling. All ranks must call this, at any time.

        Placed tensors in the object are brought to all ranks first, so all ranks must pass them.
        """
        if not dist.is_initialized():
            return obj
        if self._connections is None:
            return broadcast_value(obj, src, self.root_device)
        obj = everywhere(self._connections.places, obj, "broadcast")
        with self._connections.all_processes(), self._connections.places.local():
            return broadcast_value(obj, src, self.root_device)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a value that all ranks have: each rank has counted the whole batch, so nothing is combined.

        Only the largest or the smallest value is combined, because such values, as of a signal, may differ between
        ranks.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        value = tensor.detach()
        if self._connections is not None:
            value = self._connections.places.everywhere(value, "reduce")
        how = str(reduce_op).lower().rpartition(".")[2]
        return getattr(self.gather_from_ranks(value), f"a{how}")(0) if how in ("max", "min") else value

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensor, as on one device, because each rank has the whole batch."""
        return tensor

    @override
    def gather_from_ranks(self, values: Tensor) -> Tensor:
        """Return the tensors of all ranks in rank order (ranks, ...). All ranks must call this, at any time.

        Args:
            values: Tensor of this rank (...), of the same shape on all ranks.
        """
        connections = self._connections
        if not dist.is_initialized():
            return values[None]
        with nullcontext() if connections is None else connections.places.local():
            if connections is not None and connections.is_connected:
                return gather_tensors(values, connections.transport.control)
            # For example, `configure_optimizers` may ask for the length of an epoch before the set-up.
            with cpu_group(self.time_limit) as group:
                return gather_tensors(values, group)

    def _gather(self, row: list[float]) -> list[list[float]]:
        return gather_rows(row, self.gather_from_ranks)

    def _most(self, number: int) -> int:
        """Return the largest of the numbers that the ranks pass. All ranks must call this."""
        return int(max(row[0] for row in self._gather([number])))

    # Facts

    @override
    def loading_processes(self, processes: int) -> int:
        """Return the number of replicas of the first stage."""
        return self.request.replicas_on(processes)[0]

    # The end

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        leave_group_at_exit()
        if isinstance(exception, PeerError | DivergedError) and not (failed_before() or self.failed_elsewhere):
            # Lightning kills all ranks when a rank has died, possibly before the traceback is printed.
            print(exception, file=sys.stderr, flush=True)
        # In the process that has forked or spawned the ranks:
        if isinstance(exception, ProcessExitedException | ProcessRaisedException):
            exception.add_note(f"it was {self.placement.describe(exception.error_index)}")
        super().on_exception(exception)
