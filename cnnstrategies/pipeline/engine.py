"""`Pipeline`: one rank of a network that is cut into replicated stages, also usable from a script with plain torch."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch import Batch, Images, OutputGatherer, end_together, share_batch
from cnnstrategies.pipeline.buffers import StageBuffers
from cnnstrategies.pipeline.channels import Channels
from cnnstrategies.pipeline.gradients import BUCKET_BYTES, GradientReducer
from cnnstrategies.pipeline.losses import Loss, MeanLoss, PartialLoss
from cnnstrategies.pipeline.stage import check_backend, divide
from cnnstrategies.pipeline.step import Step
from cnnstrategies.pipeline.timeline import Clock, Span
from cnnstrategies.pipeline.timetable import Checkpointing, Order, Placement, Schedule, check_layout, tasks_of, turns
from cnnstrategies.pipeline.transport import Transport, new_group
from cnnstrategies.pipeline.whole import memory_on_disk
from cnnstrategies.quantities import Duration, as_timedelta
from cnnstrategies.runtime.allocation import reuse_freed_memory

TIMEOUT = timedelta(minutes=10)
# Number of turns by which receives are begun early under gloo. It covers all messages that a stage that runs ahead may
# send. Under gloo a message that has to wait for its receive is expensive: it arrives while the receive holds the lock
# of the connection, and gloo's thread waits for this lock in a loop, for milliseconds if cores are short. Under NCCL a
# receive that is begun early would keep the device from becoming idle.
AHEAD = 4


class Pipeline:
    """One rank's stage of a network, with the steps that all ranks run together.

    The default process group must exist, with one rank for each replica of each stage. Every rank builds the same
    network with the same weights. Use the pipeline in a ``with`` statement, or call :meth:`close` at the end:
    connections that are open when a process ends may abort the process.

    Args:
        network: The whole network. This rank's stage shares its parameters.
        cuts: Names of modules after which the network is cut, or positions, as in
            :func:`~cnnstrategies.pipeline.stage.divide`.
        replicas: Number of replicas of each stage.
        microbatches: Number of microbatches of a step, over all replicas.
        schedule: ``1f1b`` or ``gpipe``.
        run_ahead: Whether stages hold one more microbatch than necessary under 1f1b, so that messages travel while the
            stages compute.
        activation_checkpointing: Microbatches whose activations are recomputed in their backward: none, all but the
            rank's last, or all.
        device: Device of the stage.
        timeout: Longest wait for another rank: seconds, ``minutes:seconds`` or a timedelta.
        bucket_bytes: Size in bytes of the buckets in which gradients are summed over the replicas.
        placement: Numbering of the ranks, stage by stage (``stages``) or pipeline by pipeline (``replicas``); see
            :class:`~cnnstrategies.pipeline.timetable.Placement`.
        compile_backend: Backend of ``torch.compile`` with which the stage is compiled, once for each size of a
            microbatch. By default the stage is not compiled.
        shares: Share of the microbatches for each rank, in proportion to the other replicas of its stage; equal shares
            by default.

    Attributes:
        module: This rank's stage, a module with the network's parameter names.
        own_microbatches: Microbatches that this rank runs.
        shapes: Shape of each of the network's parameters and buffers.
        loss_sum: In the last stage the contribution of this rank's microbatches to the last step's loss.
        watchers: Functions that are called with each span of a training step. Without watchers nothing is timed. On a
            GPU timing synchronises at each task.
        clocks: Clocks for each kind of span and for ``loss``, which are notified when a span begins and ends. A clock
            must not wait.

    Raises:
        ConfigurationError: Cuts, replicas, microbatches and ranks do not fit together, or the network cannot be cut.
    """

    def __init__(
        self,
        network: nn.Module,
        cuts: Sequence[str | int],
        replicas: Sequence[int],
        microbatches: int,
        schedule: Schedule = "1f1b",
        run_ahead: bool = True,
        activation_checkpointing: Checkpointing = "never",
        device: torch.device | str = "cpu",
        timeout: Duration = TIMEOUT,
        bucket_bytes: int = BUCKET_BYTES,
        placement: Order = "stages",
        compile_backend: str | None = None,
        shares: Sequence[float] = (),
    ) -> None:
        ranks = Placement(tuple(replicas), placement, microbatches, tuple(shares))
        check_layout(len(cuts), ranks, dist.get_world_size())
        check_backend(compile_backend)
        reuse_freed_memory()
        self.blueprint = divide(network, cuts)
        self.microbatches = microbatches
        self.device = torch.device(device)
        self.rank = dist.get_rank()
        self.place = ranks.place(self.rank)
        self.schedule, self.run_ahead = schedule, run_ahead
        self.tasks = tasks_of(ranks, self.rank, schedule, run_ahead)
        self.own_microbatches = ranks.microbatches_of(self.rank)
        self.last = self.place.stage == ranks.stages - 1
        self.shapes = {name: t.shape for name, t in (*network.named_parameters(), *network.named_buffers())}
        self.module = self.blueprint.build(self.place.stage).to(self.device)
        limit = as_timedelta(timeout, "timeout")
        self.transport = Transport(ranks, limit, self.device)
        self.ahead = AHEAD if self.transport.has_tags else 0
        self.activation_checkpointing = activation_checkpointing
        graph = self.blueprint.stages[True][self.place.stage].graph
        calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
        # No local variable refers to the group, because torch keeps this frame alive until the next garbage collection.
        self.reducer = GradientReducer(self._trainable(), self._stage_group(limit), bucket_bytes)
        self.buffers = StageBuffers(self.module, self.reducer.group, calls)
        turn = turns(replicas, microbatches, schedule, run_ahead)
        self.channels = {
            training: Channels(
                self.blueprint.stages[training][self.place.stage],
                turn,
                self.transport,
                ask_for_all=training and activation_checkpointing != "never",
            )
            for training in (True, False)
        }
        self.compiled = compile_backend is not None
        if compile_backend is not None:
            self.module.compile(backend=compile_backend, dynamic=False)
        self.loss_sum = torch.zeros((), device=self.device)
        self.watchers: list[Callable[[Span], None]] = []
        self.clocks: dict[str, list[Clock]] = {}
        self.gatherer = OutputGatherer(self.transport)

    @property
    def placement(self) -> Placement:
        """Numbering of the ranks, and the microbatches of each rank."""
        return self.transport.placement

    def deal(self, shares: Sequence[float]) -> None:
        """Change the ranks' shares of the microbatches, from the next shared batch on.

        Every rank must call this method, between two steps.
        """
        if tuple(shares) != self.placement.shares:
            self.transport.placement = replace(self.placement, shares=tuple(shares))
            self.tasks = tasks_of(self.placement, self.rank, self.schedule, self.run_ahead)
            self.own_microbatches = self.placement.microbatches_of(self.rank)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The stage's trainable parameters, in the order of the gradients."""
        return self.reducer.parameters

    def refresh(self) -> None:
        """Update the list of trainable parameters, after parameters were frozen or unfrozen; a collective.

        Every rank must call this method, after the optimizer's step and before the next batch.
        """
        self.reducer.abandon()
        trainable = self._trainable()
        changed = torch.tensor(int(not _same(trainable, self.parameters)), dtype=torch.int32)
        if self.placement.world_size > 1:
            with self.transport.collective("looking for parameters that were frozen or unfrozen"):
                dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=self.transport.control)
        if int(changed):
            self.reducer.close()
            self.reducer = GradientReducer(trainable, self.reducer.group, self.reducer.bucket_bytes)
            for channels in self.channels.values():
                channels.forget_headers()  # A header tells which values need a gradient.

    def _trainable(self) -> list[nn.Parameter]:
        return [p for name, p in self.module.named_parameters() if p.requires_grad and name in self.blueprint.used]

    def share(
        self,
        images: Images | None,
        *rest: Tensor,
        form: Any = None,
        usual: int | None = None,
    ) -> Batch:
        """Share a global batch with all ranks, before :meth:`train` or :meth:`evaluate`; a collective.

        Args:
            images: In the first stage this replica's part of the batch (n, C, H, W) on ``device``, or a tuple if the
                network takes several tensors. Ignored in other stages.
            rest: This replica's targets (n, ...), and further tensors with one row per sample.
            form: Plain data that travels with the batch.
            usual: Average number of samples of a replica in a full step, equal on all ranks. A smaller batch fills
                fewer microbatches, instead of all microbatches with very few samples each.
        """
        with self.transport.collective("sharing a batch"):
            return share_batch(images, rest, form, self.transport, usual)

    def end_together(self) -> None:
        """Check that no rank shares a further batch, to be called when this rank has no more; a collective.

        Raises:
            ConfigurationError: A rank shares a further batch. The error is raised on all ranks.
        """
        with self.transport.collective("ending an epoch"):
            end_together(self.transport)

    def collect(self, value: Any, on_disk: bool = False) -> list[Any] | None:
        """Collect a value from the first replica of each stage on rank 0; a collective.

        Args:
            value: This rank's value: nested containers of tensors and plain data. Tensors arrive on the CPU.
            on_disk: Whether rank 0 holds the tensors of other stages in temporary files, for values that memory may not
                hold.

        Returns:
            On rank 0 the values in the order of the stages; None on the other ranks.
        """
        content = "the state of a stage"
        if self.rank == 0:
            allocate = memory_on_disk if on_disk else None
            others = [self.placement.ranks(stage)[0] for stage in range(1, self.placement.stages)]
            return [value, *(self.transport.receive_object(rank, content, allocate) for rank in others)]
        if self.place.replica == 0:
            for transfer in self.transport.send_object(value, 0, content):
                transfer.wait()
        return None

    @torch.no_grad()
    def merge(self, copy: tuple[nn.Module, nn.Module] | None = None) -> dict[str, Tensor]:
        """Return all parameters and buffers of the network, on the CPU of every rank; a collective.

        Args:
            copy: This rank's stage and the whole of another network with the same division, such as an average of the
                weights; by default the network that is trained.
        """
        module, network = copy or (self.module, self.blueprint.network)
        # All names of a tensor are listed, because the first of several names may differ between stage and network.
        stage_tensors = dict(
            (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        )
        # Only the types of the whole network's tensors are read: tensors of other stages may be without memory.
        network_tensors = dict((*network.named_parameters(), *network.named_buffers()))
        merged = {}
        for stage, names in enumerate(self.blueprint.state):
            for name in names:
                if stage == self.place.stage:
                    tensor = stage_tensors[name].detach().cpu().contiguous()
                else:
                    tensor = torch.empty(self.shapes[name], dtype=network_tensors[name].dtype)
                if self.placement.world_size > 1:
                    dist.broadcast(tensor, self.placement.ranks(stage)[0], group=self.transport.control)
                merged[name] = tensor
        return merged

    def train(
        self,
        batch: Batch,
        loss: Loss | PartialLoss,
        scale: float | Tensor = 1.0,
        more: bool = False,
    ) -> tuple[list[Tensor | None], dict[int, Any]]:
        """Run the forwards and backwards of a batch, and leave ``grad`` of the parameters unchanged.

        Args:
            batch: Result of :meth:`share`.
            loss: Mean loss from the network's outputs and the targets (n, ...), or a loss in parts. The last stage
                calls it for each microbatch.
            scale: Factor on the loss.
            more: Whether another batch follows before the optimizer's step. A stage with several replicas then keeps
                its gradients and adds them to the next batch's gradients, so that the replicas exchange them once.

        Returns:
            For each of ``parameters`` the gradient of ``scale`` times the loss of the global batch, plus the kept
            gradients of earlier batches, or None for a parameter without gradient; equal on all replicas of the stage.
            Also, in the last stage, the outputs of this rank's microbatches.

        Raises:
            ConfigurationError: Parameters were frozen or unfrozen, and :meth:`refresh` was not called.
        """
        if not _same(self._trainable(), self.parameters):
            raise ConfigurationError(
                "parameters were frozen or unfrozen in the middle of an epoch: with stages on other devices freeze and "
                "unfreeze at the beginning of an epoch (on_train_epoch_start); with plain torch call refresh() on "
                "every rank afterwards"
            )
        parts = loss if isinstance(loss, PartialLoss) else MeanLoss(loss)
        if self.last:
            parts.begin(batch)
        step = Step(self, batch, parts, scale)
        gradients = step.train(more)
        self.loss_sum = step.loss_sum
        return gradients, step.outputs

    def evaluate(self, batch: Batch) -> dict[int, Any]:
        """Run the forwards of a batch, in the present mode of ``module``.

        Returns:
            In the last stage the outputs of this rank's microbatches.
        """
        step = Step(self, batch)
        step.evaluate()
        return step.outputs

    def mean_loss(self) -> Tensor:
        """Return the loss of the last step's batch, summed over the ranks of the last stage; a collective."""
        loss = self.loss_sum.double()
        if self.placement.world_size > 1:
            with self.transport.collective("adding up the loss"):
                dist.all_reduce(loss)
        return loss

    def gather(self, batch: Batch, outputs: Mapping[int, Any]) -> Any:
        """Return the network's outputs for the whole batch, on every rank; a collective.

        Args:
            batch: The batch.
            outputs: Outputs that :meth:`train` or :meth:`evaluate` returned for the batch.
        """
        with self.transport.collective("gathering the outputs"):
            return self.gatherer.gather(batch.split, outputs, self._kind(batch))

    def step(self, images: Tensor | None, targets: Tensor | None, loss: Loss, more: bool = False) -> Tensor:
        """Run a batch and add the gradients of the mean loss to ``grad`` of the stage's parameters; a collective.

        Args:
            images: In the first stage this replica's images (n, C, H, W) on ``device``. Ignored in other stages.
            targets: Targets of the images (n, ...).
            loss: Mean loss from outputs and targets.
            more: Whether another call follows before the optimizer's step. A stage with several replicas then sets
                ``grad`` in the last call only.

        Returns:
            The mean loss over the global batch, on every rank.
        """
        batch = self.share(images, *(() if targets is None else (targets,)))
        gradients, _ = self.train(batch, loss, more=more)
        shared = self.reducer.group is not None  # The next step reuses the memory of the gradients.
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad + gradient
                else:
                    parameter.grad = gradient.clone() if shared else gradient
        return self.mean_loss()

    def close(self) -> None:
        """Close the connections between the ranks, after the last step; a collective.

        Afterwards the pipeline does not refer to the default group, so that the group's threads end when it is
        destroyed.
        """
        self.transport.check_peers()
        if self.placement.world_size > 1:
            dist.barrier(
                group=self.transport.control
            )  # Closing a connection would lose messages that are not yet read.
        self.reducer.close()
        if self.reducer.group is not None:
            dist.destroy_process_group(self.reducer.group)
        self.reducer.group = self.buffers.group = None
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the pipeline, except after an error, when other ranks may have ended."""
        if kind is None:
            self.close()

    def _kind(self, batch: Batch) -> Hashable:
        """Return a key that determines the structure and the types of the outputs."""
        kind = self.device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return self.module.training, batch.image_shapes, batch.image_dtypes, autocast

    def _stage_group(self, timeout: timedelta) -> dist.ProcessGroup | None:
        """Create the groups of all stages' replicas, in which every rank takes part, and return this stage's group."""
        stage_group = None
        for stage in range(self.placement.stages):
            ranks = self.placement.ranks(stage)
            if len(ranks) > 1:
                stage_group = new_group(ranks, timeout) or stage_group
        return stage_group


def _same(left: Sequence[nn.Parameter], right: Sequence[nn.Parameter]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
