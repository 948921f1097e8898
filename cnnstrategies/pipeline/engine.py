"""`Pipeline`, which trains one stage of a network on each rank. It can also be used in scripts without Lightning."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.buffers import StageBuffers
from cnnstrategies.pipeline.channels import AHEAD, Channels
from cnnstrategies.pipeline.engine_batch import Batch, OutputGatherer, share_batch
from cnnstrategies.pipeline.engine_loss import Loss, MeanLoss
from cnnstrategies.pipeline.engine_step import Step
from cnnstrategies.pipeline.gradients import BUCKET_BYTES, GradientReducer
from cnnstrategies.pipeline.microbatches import Images
from cnnstrategies.pipeline.stage import check_backend, divide
from cnnstrategies.pipeline.task_times import TaskTimes
from cnnstrategies.pipeline.timetable import Checkpointing, Order, Placement, Schedule, check_layout, tasks_of, turns
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.quantities import Duration, as_timedelta
from cnnstrategies.runtime.allocation import reuse_freed_memory
from cnnstrategies.runtime.groups import new_group

TIMEOUT = timedelta(minutes=10)


class Pipeline:
    """A network that is cut into stages, as seen by one rank. The rank runs its own stage.

    Create the default process group first, with one rank for each replica of each stage. Every rank must build the same
    network with the same weights. Use the pipeline in a ``with`` statement, or call :meth:`close` at the end, because a
    process that ends with open connections may abort.

    Args:
        network: The whole network. This rank's stage uses the network's own parameters, not copies.
        cuts: Names of modules after which the network is cut, or indices of the first nodes after the cuts; see
            :func:`~cnnstrategies.pipeline.stage.divide`.
        replicas: Number of replicas of each stage.
        microbatches: Number of microbatches of a step, over all replicas.
        schedule: ``1f1b`` or ``gpipe``.
        run_ahead: Whether stages hold one more microbatch than necessary under 1f1b, so that messages travel while the
            stages compute.
        activation_checkpointing: Whether activations are recomputed in the backward: for no microbatch (``never``), for
            all except the rank's last microbatch (``except_last``), or for all (``always``).
        device: Device of the stage.
        timeout: Longest wait for another rank: seconds, ``minutes:seconds`` or a timedelta.
        bucket_bytes: Size in bytes of the buckets in which gradients are summed over the replicas.
        placement: Numbering of the ranks, stage by stage (``stages``) or pipeline by pipeline (``replicas``); see
            :class:`~cnnstrategies.pipeline.timetable.Placement`.
        compile_backend: Backend of ``torch.compile`` for the stage. The stage is compiled once for each microbatch
            size. By default the stage is not compiled.
        shares: Share of each rank. The replicas of a stage divide the microbatches in proportion to their shares, by
            default equally.

    Attributes:
        module: The module of this rank's stage. Its parameters have the names that they have in the network.
        own_microbatches: Indices of the microbatches that this rank runs.
        shapes: Shapes of all parameters and buffers of the network, by name.
        loss_sum: In the last stage, the part of the last step's loss that comes from this rank's microbatches; 0 in
            other stages.
        watchers: Functions that are called with each :class:`~cnnstrategies.pipeline.timeline.Span` of a training step.
            A span is a period of time in which the rank performs one action, such as a forward. Without watchers no
            times are measured. On a GPU, measuring a span synchronises the device at its start and at its end.

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
        # The group is not stored in a local variable: torch keeps this frame alive until the next garbage collection,
        # and a local variable of the frame would keep the group alive.
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
        self.times = TaskTimes(self.transport)
        self.watchers = self.times.watchers
        self.gatherer = OutputGatherer(self.transport)

    @property
    def placement(self) -> Placement:
        """Numbering of the ranks, and the microbatches of each rank."""
        return self.transport.placement

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The stage's trainable parameters, in the order in which :meth:`train` returns their gradients."""
        return self.reducer.parameters

    def refresh(self) -> None:
        """Update the list of trainable parameters after parameters were frozen or unfrozen.

        All ranks must call this, after the optimizer's step and before the next batch.
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
            # A header says which values need a gradient. This may have changed, so the ranks must send new headers.
            for channels in self.channels.values():
                channels.forget_headers()

    def _trainable(self) -> list[nn.Parameter]:
        return [p for name, p in self.module.named_parameters() if p.requires_grad and name in self.blueprint.used]

    def share(self, images: Images | None, *rest: Tensor) -> Batch:
        """Send the targets and other tensors of a global batch from the first stage to all ranks.

        The images stay on the ranks of the first stage. All ranks must call this before each call of :meth:`train` or
        :meth:`evaluate`.

        Args:
            images: In the first stage, this replica's images (n, C, H, W) on ``device``; a tuple of tensors if the
                network takes several. Ignored in other stages.
            rest: In the first stage, this replica's targets (n, ...) and other tensors with one row per sample. Ignored
                in other stages.
        """
        with self.transport.collective("sharing a batch"):
            return share_batch(images, rest, self.transport)

    @torch.no_grad()
    def merge(self) -> dict[str, Tensor]:
        """Return all parameters and buffers of the network by name, on the CPU.

        All ranks must call this. Every rank gets the whole result.
        """
        module, network = self.module, self.blueprint.network
        # All names of a tensor are listed. If only one name of each tensor were listed, the stage and the network could
        # list the same tensor under different names.
        stage_tensors = dict(
            (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        )
        # Only dtypes are read from the whole network's tensors, because tensors of other stages may have no storage.
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
        loss: Loss | MeanLoss,
        scale: float | Tensor = 1.0,
        more: bool = False,
    ) -> tuple[list[Tensor | None], dict[int, Any]]:
        """Run the forward and backward passes of a batch, and return the gradients. All ranks must call this.

        The parameters' ``grad`` does not change.

        Args:
            batch: Result of :meth:`share`.
            loss: Function that returns the mean loss from the network's outputs and the targets (n, ...); or a
                `MeanLoss`, if the mean has another divisor than the number of samples. The last stage computes the loss
                for each microbatch.
            scale: Factor by which the loss is multiplied.
            more: Whether another batch follows before the optimizer's step. If so, a stage with several replicas keeps
                the gradients and adds the gradients of the next batch to them, so that the gradients of all batches are
                summed over the replicas only once.

        Returns:
            A list and a dictionary. The list has one element for each of ``parameters``: the gradient of ``scale``
            times the loss of the global batch, or None if the parameter has no gradient. The gradients are equal on all
            replicas of the stage, and include the gradients of earlier batches that were kept. If the gradients of this
            batch are kept, all elements are None. The dictionary has, in the last stage, the network's outputs for each
            of this rank's microbatches; in other stages it is empty.

        Raises:
            ConfigurationError: Parameters were frozen or unfrozen, and :meth:`refresh` was not called.
        """
        if not _same(self._trainable(), self.parameters):
            raise ConfigurationError(
                "parameters were frozen or unfrozen in the middle of an epoch: with a pipeline, freeze and unfreeze at "
                "the beginning of an epoch (on_train_epoch_start); without Lightning, call refresh() on every rank "
                "afterwards"
            )
        parts = loss if isinstance(loss, MeanLoss) else MeanLoss(loss)
        if self.last:
            parts.begin(batch)
        step = Step(self, batch, parts, scale)
        gradients = step.train(more)
        self.loss_sum = step.loss_sum
        return gradients, step.outputs

    def evaluate(self, batch: Batch) -> dict[int, Any]:
        """Run the forward passes of a batch, in the current mode of ``module``. All ranks must call this.

        Returns:
            A dictionary. In the last stage, its keys are this rank's microbatches, and its values are the network's
            outputs; in other stages it is empty.
        """
        step = Step(self, batch)
        step.evaluate()
        return step.outputs

    def mean_loss(self) -> Tensor:
        """Return the loss of the last step's batch, on every rank. All ranks must call this."""
        loss = self.loss_sum.double()
        if self.placement.world_size > 1:
            with self.transport.collective("adding up the loss"):
                dist.all_reduce(loss)
        return loss

    def gather(self, batch: Batch, outputs: Mapping[int, Any]) -> Any:
        """Return the network's outputs for the whole batch, on every rank. All ranks must call this.

        Args:
            batch: The batch.
            outputs: Outputs that :meth:`train` or :meth:`evaluate` returned for this batch.
        """
        with self.transport.collective("gathering the outputs"):
            return self.gatherer.gather(batch.split, outputs, self._kind(batch))

    def step(self, images: Tensor | None, targets: Tensor | None, loss: Loss, more: bool = False) -> Tensor:
        """Run a batch, and add the gradients of the mean loss to ``grad`` of the stage's parameters.

        All ranks must call this.

        Args:
            images: In the first stage, this replica's images (n, C, H, W) on ``device``. Ignored in other stages.
            targets: In the first stage, the targets of the images (n, ...). Ignored in other stages.
            loss: Function that returns the mean loss from outputs and targets.
            more: Whether another call follows before the optimizer's step. If the stage has several replicas, a call
                with ``more`` leaves ``grad`` unchanged, and the next call without ``more`` adds the gradients of all
                these batches.

        Returns:
            The mean loss over the global batch, on every rank.
        """
        batch = self.share(images, *(() if targets is None else (targets,)))
        gradients, _ = self.train(batch, loss, more=more)
        # If the stage has several replicas, the next step overwrites the tensors that `train` returned. They are cloned
        # here, because `grad` must keep its values.
        shared = self.reducer.group is not None
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad + gradient
                else:
                    parameter.grad = gradient.clone() if shared else gradient
        return self.mean_loss()

    def close(self) -> None:
        """Close the connections between the ranks, after the last step. All ranks must call this.

        The pipeline also drops its references to the default process group, so that the threads of the group end when
        the caller destroys the group.
        """
        self.transport.check_peers()
        if self.placement.world_size > 1:
            # Without the barrier, a rank could close a connection before its peer has read all messages.
            dist.barrier(group=self.transport.control)
        self.reducer.close()
        if self.reducer.group is not None:
            dist.destroy_process_group(self.reducer.group)
        self.reducer.group = self.buffers.group = None
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the pipeline if the ``with`` block has ended without an error.

        After an error the connections stay open, because closing them would wait for ranks that may have ended.
        """
        if kind is None:
            self.close()

    def _kind(self, batch: Batch) -> Hashable:
        """Return a key of a batch. If two batches have equal keys, their outputs have equal structures and dtypes."""
        kind = self.device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return self.module.training, batch.image_shapes, batch.image_dtypes, autocast

    def _stage_group(self, timeout: timedelta) -> dist.ProcessGroup | None:
        """Create a process group for the replicas of each stage, and return this stage's group.

        All ranks must call this, because torch requires every rank to create every group. The result is None if the
        stage has one replica.
        """
        stage_group = None
        for stage in range(self.placement.stages):
            ranks = self.placement.ranks(stage)
            if len(ranks) > 1:
                stage_group = new_group(ranks, timeout) or stage_group
        return stage_group


def _same(left: Sequence[nn.Parameter], right: Sequence[nn.Parameter]) -> bool:
    """Whether two lists contain the same objects in the same order."""
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
