"""The strategy ``spatial``: each image is divided among several devices."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from cnnstrategies._lightning_private import allow_skipped_steps, keep_batches, leave_samplers
from cnnstrategies.data.division import is_divided
from cnnstrategies.data.module import ImageDataModule
from cnnstrategies.old_names import refuse_old_names
from cnnstrategies.placed.runner import CPU
from cnnstrategies.quantities import Duration, as_timedelta
from cnnstrategies.runtime.generator_states import GeneratorStates
from cnnstrategies.runtime.groups import gather_rows, gather_tensors
from cnnstrategies.runtime.processes import end_group_at_exit, leave_group_at_exit
from cnnstrategies.spatial.gradient_sums import agree_on_hooks
from cnnstrategies.strategies.default_group import default_group
from cnnstrategies.strategies.differences import RANK_ZERO, differences_of_replicas
from cnnstrategies.strategies.exact_means import ExactMeans
from cnnstrategies.strategies.failing import FailingTogetherDDPStrategy
from cnnstrategies.strategies.protocol import StepKind, StrategyFacts
from cnnstrategies.strategies.sample_weights import weigh_samples
from cnnstrategies.strategies.spatial.checks import check_devices, check_division, check_module, check_parts
from cnnstrategies.strategies.spatial.descriptions import describe_costs, describe_groups, describe_parts, describe_rows
from cnnstrategies.strategies.spatial.groups import ImageGroups
from cnnstrategies.strategies.spatial.loading import GroupLoader
from cnnstrategies.strategies.spatial.parted_batches import check_axis
from cnnstrategies.strategies.spatial.predictions import predictions_of_group
from cnnstrategies.strategies.spatial.replicas import average_gradients, copy_first, metrics_of_replicas, whole_tensor
from cnnstrategies.strategies.spatial.same_weights import SameWeights
from cnnstrategies.strategies.streams import divide_stream
from cnnstrategies.strategies.without_ddp import check_keywords, own_metric_states

# Number of steps of training, validation, test and prediction in which the ranks compare their operations.
CHECKED_STEPS = 2


class SpatialStrategy(StrategyFacts, ExactMeans, FailingTogetherDDPStrategy):
    """Each image is divided among several devices, so images may be larger than the memory of one device allows.

    The devices form groups of ``parts`` devices. Each group trains on its own batch, as a device does under DDP. Inside
    of a group, each device has some rows of each image and of each activation, see :mod:`cnnstrategies.spatial`. The
    module's code sees tensors with the shapes, values, statistics and gradients of the whole images.

    Args:
        parts: Number of devices in a group, 1 or more. The number of devices must be a multiple of it.
        axis: The dimension of images that is divided: -1 for the width, -2 for the height, -3 for the depth of volumes.
            By default it is the longest dimension of the images of each batch.
        timeout: Longest time to wait for another rank: seconds, ``minutes:seconds`` or a timedelta.
        **kwargs: Options of :class:`~lightning.pytorch.strategies.DDPStrategy` for devices and launching.

    Raises:
        ConfigurationError: An option has a value that is not allowed. If the number of devices does not fit, the error
            is raised before processes start.
    """

    strategy_name = "spatial"
    step_kind: StepKind = "parts"
    divides_values = True
    gradient_buckets = None  # What a device holds depends on its part of the images.

    def __init__(
        self,
        parts: int = 2,
        axis: int | None = None,
        process_group_backend: str | None = None,
        timeout: Duration = 600.0,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        check_parts(parts)
        check_axis(axis)
        limit = as_timedelta(timeout, "timeout")
        refuse_old_names(SpatialStrategy, kwargs)
        check_keywords("SpatialStrategy", kwargs)
        super().__init__(
            process_group_backend=process_group_backend, timeout=limit, start_method=start_method, **kwargs
        )
        self.parts, self.axis, self.time_limit = parts, axis, limit
        self._groups: ImageGroups | None = None
        self._everyone: dist.ProcessGroup | None = None
        self._contexts = ExitStack()
        self._accumulates = self._buffers_differ = self._failed = False
        self._same_weights: SameWeights | None = None
        self._sent_before: int | None = None  # Bytes that were sent before the first step; -1 after the second began.
        self._rows = ""  # Text about this rank's rows of the first batch.
        self._steps: Counter[Any] = Counter()  # Number of steps of each kind of run.
        self._examined: tuple[object, bool] | None = None  # The last loader, and whether its data are divided.

    # Before the processes start

    @property
    @override
    def launcher(self) -> Any:
        """Lightning's launcher. Lightning reads this property right before it starts processes."""
        self._check(self.num_nodes * self.num_processes)
        return super().launcher

    def _check(self, devices: int) -> None:
        device = self.root_device
        check_devices(self.parts, devices, device, self.process_group_backend, self._layer_sync is not None)
        if self.lightning_module is not None:
            check_module(self.lightning_module)

    @override
    def check_job(self, module: LightningModule, processes: int) -> None:
        check_devices(self.parts, processes, CPU, None, False)
        check_module(module)

    # Set-up

    @override
    def setup_environment(self) -> None:
        existed, states = dist.is_initialized(), GeneratorStates.current(CPU)
        super().setup_environment()
        trainer = self._module.trainer
        self._failed = False
        self._check(self.world_size)
        own_metric_states(self._module)
        keep_batches(trainer, divide_stream)
        if self.replicas == 1:
            leave_samplers(trainer)  # Lightning's sampler would shuffle ordered data.
            if self._start_method not in ("spawn", "forkserver"):
                # Lightning has set the generators to the seed of `seed_everything`. On one device the run continues
                # with the random numbers that follow those of the module and the data.
                states.restore(CPU)
        else:
            weigh_samples(trainer)
        if not existed:
            end_group_at_exit()
        # Loaders may be asked for before the set-up.
        self._groups = ImageGroups(self.global_rank, self.world_size, self.parts, self.root_device, self.time_limit)
        self._everyone = dist.group.WORLD

    @override
    def setup(self, trainer: Any) -> None:
        check_module(self._module)  # `configure_model` may have built the network.
        super().setup(trainer)
        self._accumulates = self._buffers_differ = False
        self._sent_before = None
        self._same_weights = SameWeights(self._module, self._ranks)
        if self.replicas == 1:
            allow_skipped_steps(trainer)  # All ranks have the same batch, so they skip the same steps.
        self._ranks.same_random_numbers()
        self._contexts.enter_context(self._ranks.parts)
        self._contexts.enter_context(metrics_of_replicas(self._ranks.counterparts))

    @override
    def configure_ddp(self) -> None:
        """Start with the parameters and buffers of rank 0 on all ranks."""
        copy_first([*self._module.parameters(), *self._module.buffers()])

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _ranks(self) -> ImageGroups:
        assert self._groups is not None, "the processes have been started"
        return self._groups

    @property
    def replicas(self) -> int:
        """Number of groups of devices, which train on different batches."""
        return self.loading_processes(self.num_nodes * self.num_processes)  # Not 0 until the check refuses the number.

    # Data

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of Lightning's sampler. The groups divide the samples."""
        return {"num_replicas": self.replicas, "rank": self.global_rank // self.parts}

    @override
    def keeps_sampler(self, loader: DataLoader[Any]) -> bool:
        """Whether the user's code has divided a loader's data among the groups. All ranks must call this."""
        if self._examined is None or self._examined[0] is not loader:
            check_division(loader, self.replicas, self.parts, self._gather_in(self._ranks.cpu_group))
            gather = self._gather_in(self._ranks.cpu_counterparts)
            self._examined = loader, bool(is_divided(loader, self.replicas, gather))
        return self._examined[1]

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self._examined is None or self._examined[0] is not dataloader:
            check_division(dataloader, self.replicas, self.parts, self._gather_in(self._ranks.cpu_group))
        is_predicting = self._module.trainer.state.fn == TrainerFn.PREDICTING
        return GroupLoader(dataloader, self._ranks, self.axis, is_predicting)

    @staticmethod
    def _gather_in(group: dist.ProcessGroup) -> Any:
        return lambda row: gather_rows(row, lambda values: gather_tensors(values, group))

    # Steps

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Return a context for the batches whose gradients are accumulated, except for the last one."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            # As under DDP, the next step begins with the first group's buffers, unless gradients are accumulated.
            self._buffers_differ = not self._accumulates
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            return predictions_of_group(self._ranks, super().predict_step(*args, **kwargs))

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Return a context for a step, in which the default process group has each group of devices once."""
        kind = self._module.trainer.state.stage
        self._ranks.parts.checks_order = self._steps[kind] < CHECKED_STEPS
        self._steps[kind] += 1
        if self._buffers_differ:
            copy_first(self._module.buffers(), self._ranks.counterparts)
            self._buffers_differ = False
        with default_group(self._ranks.counterparts):
            yield

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        agree_on_hooks(self._ranks.parts, list(self._module.parameters()))
        with default_group(self._ranks.counterparts):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        """Average the gradients over the groups. In a group, all ranks have the gradients of the whole images."""
        super().post_backward(closure_loss)
        parameters = list(self._module.parameters())
        self._ranks.parts.plain_gradients(self._module.named_parameters())
        if not self._accumulates:
            average_gradients(parameters, self._ranks.counterparts, self._ranks.cpu_counterparts)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Print what the first step has sent, at the start of the second step, and compare the ranks' weights."""
        super().on_train_batch_start(batch, batch_idx)
        assert self._same_weights is not None, "the set-up has created it"
        self._same_weights.before_step()
        parts = self._ranks.parts
        if self._sent_before is None:
            self._sent_before, self._rows = parts.sent_bytes, describe_rows(batch)
            parts.gathers.clear()
        elif self._sent_before >= 0:
            rank_zero_info(describe_costs(parts, self._sent_before, self._rows))
            self._sent_before = -1

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        check_module(self._module)  # A hook may have compiled a layer.

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        assert self._same_weights is not None, "the set-up has created it"
        self._same_weights.compare()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        # In manual optimization, the user's code may have written gradients that are divided.
        self._ranks.parts.plain_gradients(self._module.named_parameters())
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    # Collectives

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            with default_group(self._everyone or dist.group.WORLD):
                super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        with default_group(self._everyone or dist.group.WORLD):
            return super().broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Combine a value over the groups of devices. In a group, all ranks have the same value.

        The largest or the smallest value is that of all ranks, because such values, as of a signal, may differ between
        the ranks of a group.
        """
        if isinstance(tensor, Tensor):
            tensor = whole_tensor(tensor, "reduce")
            how = str(reduce_op).lower().rpartition(".")[2]
            if how in ("max", "min") and not self._is_users(group):
                return getattr(self.gather_from_ranks(tensor.detach()), f"a{how}")(0)
        if (group := self._group_of_replicas(group)) is None:
            return tensor
        return super().reduce(tensor, group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any of them, have decided so. All ranks must call this."""
        votes = self.gather_from_ranks(torch.tensor([int(decision)], device=self.root_device))
        return bool(votes.all() if all else votes.any())

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor of each group of devices (groups, ...). With one group, return the tensor."""
        tensor = whole_tensor(tensor, "all_gather")
        if (group := self._group_of_replicas(group)) is None:
            return tensor
        return super().all_gather(tensor, group, sync_grads)

    def _group_of_replicas(self, group: Any) -> Any:
        """Return the group for a collective: a user's own group, or each group of devices once; None for one group."""
        if self._groups is None:
            return None
        if self._is_users(group):
            return group
        return self._groups.counterparts if self.replicas > 1 else None

    def _is_users(self, group: Any) -> bool:
        """Whether a group is one that the user's code has created."""
        ours = None if self._groups is None else self._groups.counterparts
        return group is not None and group not in (self._everyone, ours)

    @override
    def gather_from_ranks(self, values: Tensor) -> Tensor:
        if not dist.is_initialized():
            return values[None]
        gathered = super().all_gather(values, self._everyone or dist.group.WORLD)
        return gathered.reshape(-1, *values.shape)

    # Facts

    @property
    @override
    def has_global_batches(self) -> bool:
        return self.replicas == 1

    @property
    @override
    def has_layers_of_one_device(self) -> bool:
        return self.replicas == 1

    @property
    @override
    def ranks_per_batch(self) -> int:
        return self.parts

    @property
    @override
    def image_division(self) -> tuple[int, int | None]:
        return self.parts, self.axis

    @override
    def loading_processes(self, processes: int) -> int:
        """Return the number of groups."""
        return max(1, processes // self.parts)

    @override
    def panel_rows(self, batch_size: int | None) -> list[tuple[str, str]]:
        data = getattr(self._module.trainer, "datamodule", None)
        shape = data.image_shape if isinstance(data, ImageDataModule) else None
        return [
            ("image parts", describe_parts(self.parts, self.axis, shape)),
            ("device groups", describe_groups(self.parts, self.replicas)),
        ]

    @override
    def differences(self, batch_size: int | None) -> list[str]:
        return differences_of_replicas(self._module, self.replicas, batch_size, RANK_ZERO, True, "group")

    # The end

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        leave_group_at_exit()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._contexts.close()
        groups, self._groups, self._everyone = self._groups, None, None
        if groups is not None and not self._failed:
            groups.close()
        super().teardown()
