"""`Pipeline`: one rank of a network that is cut into replicated stages, for a script with plain torch."""

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
from cnnstrategies.runtime.allocation import reuse_freed_memory

TIMEOUT = timedelta(minutes=10)
# Tasks whose messages are received early under gloo, all that a stage that runs ahead may send before. A message that
# has to wait for its receive is expensive there: it arrives while the receive holds the connection's lock, for which
# gloo's own thread then waits in a loop, for milliseconds where cores are short. Under NCCL a receive that is begun
# early would keep the device from getting idle.
AHEAD = 4


class Pipeline:
    """One rank's stage of a network, and the steps that all ranks run together.

    The default process group must exist, with as many ranks as there are replicas of all stages. Every rank builds
    the same network with the same weights. To be used in a ``with`` statement, or closed at the end: connections that
    are left open when a process ends may abort it.

    Args:
        network: The whole network; this rank's stage shares its parameters.
        cuts: Names of modules after which the network is cut, or positions, as in
            :func:`~cnnstrategies.pipeline.stage.divide`.
        replicas: Replicas of each stage.
        microbatches: Microbatches of a step, over all replicas.
        schedule: ``1f1b`` or ``gpipe``.
        run_ahead: Under 1f1b have stages hold one microbatch more than is needed, so that messages travel while they
            compute.
        activation_checkpointing: Recompute a microbatch's activations in its backward: for no microbatch, for all but
            the rank's last, or for all.
        device: Where the stage runs.
        timeout: How long to wait for another rank.
        bucket_bytes: Size of the buckets in which gradients are summed over the replicas.
        placement: Number the ranks stage by stage (``stages``), or pipeline by pipeline (``replicas``); see
            :class:`~cnnstrategies.pipeline.timetable.Placement`.
        compile_backend: Compile the stage with this ``torch.compile`` backend, for each size of a microbatch anew; not
            compiled when left out.
        shares: For each rank what part of the microbatches it runs, in proportion to the other replicas of its stage;
            by default the same.

    Attributes:
        module: This rank's stage, a module with the network's parameter names.
        own: The microbatches that run here.
        shapes: Shape of each of the network's parameters and buffers.
        loss_sum: In the last stage what this rank's microbatches have added to the last step's loss.
        watchers: Called with each span of a training step; while there are none, nothing is timed. On a GPU timing
            synchronises at each task.
        clocks: For a kind of span, or for ``loss``, what is told when each begins and ends; they may not wait.

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
        timeout: timedelta = TIMEOUT,
        bucket_bytes: int = BUCKET_BYTES,
        placement: Order = "stages",
        compile_backend: str | None = None,
        shares: Sequence[float] = (),
    ) -> None:
        given = Placement(tuple(replicas), placement, microbatches, tuple(shares))
        check_layout(len(cuts), given, dist.get_world_size())
        check_backend(compile_backend)
        reuse_freed_memory()
        self.blueprint = divide(network, cuts)
        self.microbatches = microbatches
        self.device = torch.device(device)
        self.rank = dist.get_rank()
        self.place = given.place(self.rank)
        self.schedule, self.run_ahead = schedule, run_ahead
        self.tasks = tasks_of(given, self.rank, schedule, run_ahead)
        self.own = given.own(self.rank)
        self.last = self.place.stage == given.stages - 1
        self.shapes = {name: t.shape for name, t in (*network.named_parameters(), *network.named_buffers())}
        self.module = self.blueprint.build(self.place.stage).to(self.device)
        self.transport = Transport(given, timeout, self.device)
        self.ahead = AHEAD if self.transport.has_tags else 0
        self.activation_checkpointing = activation_checkpointing
        graph = self.blueprint.stages[True][self.place.stage].graph
        calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
        # No variable here holds the group: torch keeps this frame until its garbage is collected.
        self.reducer = GradientReducer(self._trainable(), self._stage_group(timeout), bucket_bytes)
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
        """The numbering of the ranks, and which microbatches each runs."""
        return self.transport.placement

    def deal(self, shares: Sequence[float]) -> None:
        """Have other shares of the microbatches run, of all that is shared from here on.

        To be called by every rank, between two steps.
        """
        if tuple(shares) != self.placement.shares:
            self.transport.placement = replace(self.placement, shares=tuple(shares))
            self.tasks = tasks_of(self.placement, self.rank, self.schedule, self.run_ahead)
            self.own = self.placement.own(self.rank)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The stage's trainable parameters, in the order of the gradients."""
        return self.reducer.parameters

    def refresh(self) -> None:
        """Look which parameters are trainable now, after some were frozen or unfrozen; a collective.

        To be called by every rank, before the first step after the optimizer's.
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
                channels.forget_headers()  # They tell which values want a gradient.

    def _trainable(self) -> list[nn.Parameter]:
        return [p for name, p in self.module.named_parameters() if p.requires_grad and name in self.blueprint.used]

    def share(
        self,
        images: Images | None,
        *rest: Tensor,
        form: Any = None,
        usual: int | None = None,
    ) -> Batch:
        """Make a global batch known to all ranks, before :meth:`train` or :meth:`evaluate`; a collective.

        Args:
            images: In the first stage this replica's part of the batch (n, C, H, W) on ``device``, or a tuple where
                the network takes several tensors; elsewhere ignored.
            rest: This replica's targets (n, ...), and what else belongs to the samples.
            form: Plain data that travels with the batch.
            usual: Samples that a replica has, on an average, in a full step, the same on every rank: with fewer, fewer
                microbatches are filled, instead of all with very few each.
        """
        with self.transport.collective("sharing a batch"):
            return share_batch(images, rest, form, self.transport, usual)

    def end_together(self) -> None:
        """See that no rank shares a further batch, where this one has no more; a collective.

        Raises:
            ConfigurationError: One does; it is raised on all ranks.
        """
        with self.transport.collective("ending an epoch"):
            end_together(self.transport)

    def collect(self, value: Any, on_disk: bool = False) -> list[Any] | None:
        """Each stage's value, from its first replica, on rank 0; a collective.

        Args:
            value: Nested containers of tensors and plain data; tensors arrive on the CPU.
            on_disk: Hold those of other stages in temporary files, where memory may not hold all.

        Returns:
            On rank 0 the values in the order of the stages; None on the other ranks.
        """
        what = "the state of a stage"
        if self.rank == 0:
            allocate = memory_on_disk if on_disk else None
            others = [self.placement.ranks(stage)[0] for stage in range(1, self.placement.stages)]
            return [value, *(self.transport.receive_object(rank, what, allocate) for rank in others)]
        if self.place.replica == 0:
            for one in self.transport.send_object(value, 0, what):
                one.wait()
        return None

    @torch.no_grad()
    def merge(self, copy: tuple[nn.Module, nn.Module] | None = None) -> dict[str, Tensor]:
        """All parameters and buffers of the network, on the CPU of every rank; a collective.

        Args:
            copy: Another network that is divided as this one, such as an average of the weights: this rank's stage of
                it and the whole; by default the one that is trained.
        """
        module, network = copy or (self.module, self.blueprint.network)
        # A tensor with two names has here perhaps another one first than in the network.
        own = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
        # Of the whole the types are read alone: what is of other stages may be without memory.
        everything = dict((*network.named_parameters(), *network.named_buffers()))
        merged = {}
        for stage, names in enumerate(self.blueprint.state):
            for name in names:
                if stage == self.place.stage:
                    tensor = own[name].detach().cpu().contiguous()
                else:
                    tensor = torch.empty(self.shapes[name], dtype=everything[name].dtype)
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
        """Run the forwards and backwards of a batch; ``grad`` of the parameters is left as it was.

        Args:
            batch: What :meth:`share` returned.
            loss: Mean loss from the network's outputs and the targets (n, ...), or a loss in parts; called in the
                last stage for each microbatch.
            scale: Factor on the loss.
            more: Another batch follows before the optimizer's step. A stage with replicas then keeps its gradients
                and adds them to those of the next batch, so that the replicas exchange them once.

        Returns:
            For each of ``parameters`` the gradient of ``scale`` times the loss of the global batch, added to those of
            the batches before it that were kept, the same on all replicas of the stage, or None; and in the last
            stage the outputs of this rank's microbatches.

        Raises:
            ConfigurationError: Parameters were frozen or unfrozen, and :meth:`refresh` was not called.
        """
        if not _same(self._trainable(), self.parameters):
            raise ConfigurationError(
                "parameters were frozen or unfrozen in the middle of an epoch: with stages on other devices do it at "
                "the beginning of one (on_train_epoch_start); with plain torch call refresh() on every rank afterwards"
            )
        parts = loss if isinstance(loss, PartialLoss) else MeanLoss(loss)
        if self.last:
            parts.begin(batch)
        step = Step(self, batch, parts, scale)
        gradients = step.train(more)
        self.loss_sum = step.loss_sum
        return gradients, step.outputs

    def evaluate(self, batch: Batch) -> dict[int, Any]:
        """Run the forwards of a batch, in the mode that ``module`` is in.

        Returns:
            In the last stage the outputs of this rank's microbatches.
        """
        step = Step(self, batch)
        step.evaluate()
        return step.outputs

    def mean_loss(self) -> Tensor:
        """The loss of the last step's batch, as the last stage has added it up; a collective."""
        loss = self.loss_sum.double()
        if self.placement.world_size > 1:
            with self.transport.collective("adding up the loss"):
                dist.all_reduce(loss)
        return loss

    def gather(self, batch: Batch, outputs: Mapping[int, Any]) -> Any:
        """What the network would have returned for the whole batch, on every rank; a collective.

        Args:
            batch: The batch.
            outputs: What :meth:`train` or :meth:`evaluate` returned for it.
        """
        with self.transport.collective("gathering the outputs"):
            return self.gatherer.gather(batch.split, outputs, self._kind(batch))

    def step(self, images: Tensor | None, targets: Tensor | None, loss: Loss, more: bool = False) -> Tensor:
        """Run a batch and add the gradients of the mean loss to ``grad`` of the stage's parameters; a collective.

        Args:
            images: In the first stage this replica's images (n, C, H, W) on ``device``; elsewhere ignored.
            targets: Their targets (n, ...).
            loss: Mean loss from outputs and targets.
            more: Another step follows before the optimizer's: ``grad`` of a stage with replicas waits for it.

        Returns:
            The mean loss over the global batch, on every rank.
        """
        batch = self.share(images, *(() if targets is None else (targets,)))
        gradients, _ = self.train(batch, loss, more=more)
        shared = self.reducer.group is not None  # The gradients' memory is used again.
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad + gradient
                else:
                    parameter.grad = gradient.clone() if shared else gradient
        return self.mean_loss()

    def close(self) -> None:
        """Give the connections between the ranks back, after the last step; a collective.

        The default group's threads end with it, when it is destroyed: nothing here refers to it any more.
        """
        self.transport.check_peers()
        if self.placement.world_size > 1:
            dist.barrier(group=self.transport.control)  # A rank that closes one may have sent what is not yet read.
        self.reducer.close()
        if self.reducer.group is not None:
            dist.destroy_process_group(self.reducer.group)
        self.reducer.group = self.buffers.group = None
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close it, unless an error has come: the other ranks may not be there."""
        if kind is None:
            self.close()

    def _kind(self, batch: Batch) -> Hashable:
        """What structure and types of the outputs depend on."""
        kind = self.device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return self.module.training, batch.image_shapes, batch.image_dtypes, autocast

    def _stage_group(self, timeout: timedelta) -> dist.ProcessGroup | None:
        """The replicas of this rank's stage; every rank takes part in making every group."""
        mine = None
        for stage in range(self.placement.stages):
            ranks = self.placement.ranks(stage)
            if len(ranks) > 1:
                mine = new_group(ranks, timeout) or mine
        return mine


def _same(some: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))
