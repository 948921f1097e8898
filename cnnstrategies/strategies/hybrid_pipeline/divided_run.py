"""The module during a run: its network is divided among the ranks, until the end of the run brings it back to all."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from cnnstrategies._torch_private import not_intercepted, swap_contents
from cnnstrategies.pipeline.channels import AHEAD
from cnnstrategies.pipeline.placed_network import PlacedNetwork
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.placed import ForeignTensor, Places
from cnnstrategies.placed.hidden import hide_foreign_gradients
from cnnstrategies.runtime.groups import GatherRows, broadcast_value
from cnnstrategies.strategies.hybrid_pipeline.checks import check_stages
from cnnstrategies.strategies.hybrid_pipeline.chosen_network import ChosenNetwork
from cnnstrategies.strategies.hybrid_pipeline.compiling import compile_stages
from cnnstrategies.strategies.hybrid_pipeline.connections import RunConnections
from cnnstrategies.strategies.hybrid_pipeline.descriptions import describe_pipeline
from cnnstrategies.strategies.hybrid_pipeline.epoch_ends import EndTogether
from cnnstrategies.strategies.hybrid_pipeline.logs import PlacedLogs
from cnnstrategies.strategies.hybrid_pipeline.metric_values import metrics_of_one_process, share_metrics
from cnnstrategies.strategies.hybrid_pipeline.network import DividedForward, tensors_of
from cnnstrategies.strategies.hybrid_pipeline.order import declare_loss, describe_order
from cnnstrategies.strategies.hybrid_pipeline.placed_module import PlacedModule
from cnnstrategies.strategies.hybrid_pipeline.stage_times import StageTimes, measure_waits
from cnnstrategies.strategies.hybrid_pipeline.start_values import share_among_replicas
from cnnstrategies.strategies.hybrid_pipeline.steps import UserSteps

if TYPE_CHECKING:
    from cnnstrategies.planning.lighter import LighterPlan
    from cnnstrategies.planning.memory import PeakMemory


CLIPPING = ("clip_grad_by_norm", "clip_grad_by_value")  # Methods of Lightning's precision.


class DividedRun:
    """A module in a run of the trainer, with its network divided among the ranks.

    All ranks create this object, and call :meth:`divide`, :meth:`begin` and :meth:`end` in this order.

    Attributes:
        values: The module's parameters and buffers; None before :meth:`divide`.

    Args:
        module: The module.
        chosen: The network that is divided, whose layout has been chosen.
        connections: The connections of this rank.
        device: Device of this rank.
    """

    def __init__(
        self, module: LightningModule, chosen: ChosenNetwork, connections: RunConnections, device: torch.device
    ) -> None:
        self._module, self._chosen, self._connections, self._device = module, chosen, connections, device
        self._places = connections.places
        self.values: PlacedModule | None = None
        self._forward: DividedForward | None = None
        self._steps: UserSteps | None = None
        self._optimizers: Sequence[Optimizer] = []  # Optimizers whose states are divided among the ranks.
        self._replaced = ExitStack()  # Gives objects of the user their own methods back.
        self._entered = ExitStack()  # Turns the rules off.

    @property
    def placed(self) -> PlacedNetwork:
        """The divided network."""
        assert self._forward is not None, "the network has been divided"
        return self._forward.placed

    @property
    def steps(self) -> UserSteps:
        """The module's steps and backwards."""
        assert self._steps is not None, "the network has been divided"
        return self._steps

    # The set-up

    def divide(self, placement: Placement) -> None:
        """Divide the network, and give all parameters and buffers of the module their places.

        Args:
            placement: Numbering of the ranks, with the shares of the microbatches.
        """
        module, places, request = self._module, self._places, self._chosen.request
        in_parts = not self._chosen.is_whole(module)
        # Before the division, because logs change metrics as well, and changes are undone in reverse order.
        self._replaced.callback(share_metrics(places, [module, *self._callbacks]))
        self._forward = DividedForward(self._divided(placement))
        self._replaced.callback(self._forward.remove)
        measure_waits(places, self.placed.runner.times)
        self.values = PlacedModule(module, self.placed, places, in_parts)
        logs = PlacedLogs(module, places)
        self._replaced.callback(logs.remove)
        # Without a limit, as on a CPU, the first step need not save memory.
        is_limited = self._device.type == "cuda" or request.memory_limit is not None
        saves_memory = is_limited and request.activation_checkpointing is None
        declare_loss(self.placed, module, logs, request.schedule, saves_memory)
        if in_parts:
            share_among_replicas(module, self.placed.runner.replicas.group)
        self._steps = UserSteps(module, self.placed, self.values, logs, self._connections)

    def _divided(self, placement: Placement) -> PlacedNetwork:
        module, layout = self._module, self._chosen.layout
        transport = self._connections.connect(placement)
        ahead = AHEAD if transport.has_tags else 0
        from_rank_zero = partial(broadcast_value, source=0, device=self._device)
        check = partial(check_stages, module, partial(self._chosen.example, module), from_rank_zero)
        placed = PlacedNetwork(self._chosen.network(module), layout.cuts, self._places, transport, ahead, module, check)
        runner = placed.runner
        runner.microbatches, runner.run_ahead = layout.microbatches, layout.run_ahead
        runner.activation_checkpointing = layout.checkpointing
        compile_stages(module, placed.division)
        return placed

    def divide_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """From now on, have each rank's optimizers change the rank's own parameters alone.

        Args:
            optimizers: The optimizers of this run. In a validation after a training there are none, because rank 0 has
                the whole states of the training's optimizers.
        """
        self._optimizers = optimizers
        for optimizer in optimizers:
            self._replaced.callback(hide_foreign_gradients(self._places, optimizer).remove)
        precision = self._module.trainer.precision_plugin
        for name in CLIPPING:
            if getattr(getattr(precision, name), "__func__", None) is getattr(Precision, name):
                # Lightning's own code calls only functions that need no rules.
                vars(precision)[name] = not_intercepted(getattr(precision, name))
                self._replaced.callback(vars(precision).pop, name, None)

    def begin(self, gather: GatherRows) -> None:
        """Let all ranks follow the rules for placed tensors, from now on and with equal random numbers.

        Args:
            gather: Function that returns the rows of numbers that all ranks pass. All ranks must call this function.
        """
        self._connections.same_random_numbers()
        self._replaced.enter_context(metrics_of_one_process())
        self._callbacks.insert(0, EndTogether(partial(self._connections.end_together, self.placed.ranks[0])))
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            if self._chosen.layout.planned:
                self._callbacks.append(StageTimes(self.placed.runner.times, self._chosen.layout.recut, gather))
            self._chosen.keep_cuts()
        self._replaced.callback(_remove, self._callbacks, EndTogether, StageTimes)
        self._entered.enter_context(self._places)

    @property
    def _callbacks(self) -> list[Callback]:
        callbacks: list[Callback] = self._module.trainer.callbacks  # type: ignore[attr-defined]  # set outside the class
        return callbacks

    # During the run

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state, on rank 0 with the values of all ranks. All ranks must call this."""
        if self.values is None or not self._optimizers:
            return optimizer.state_dict()
        return self.values.optimizer_state_on_rank_zero(optimizer)

    def panel_rows(self, batch_size: int | None) -> list[tuple[str, str]]:
        """Return the strategy's rows of the start panel; see `StrategyFacts`."""
        placed, request = self.placed, self._chosen.request
        graphs, counts = placed.division.graphs(), self.parameters_of_stages()
        rows = describe_pipeline(placed.runner.placement, graphs, counts, request, batch_size)
        if placed.runner.microbatches == 1:
            rows[0] = ("microbatches", "1, which runs on the first replica of each stage")
        rows.append(("order", describe_order(placed, self._module, request.schedule)))
        rows += self._chosen.layout.panel_rows()
        return rows if placed.one_microbatch is None else [*rows, ("one microbatch", placed.one_microbatch)]

    def predicted_peaks(self) -> "list[PeakMemory]":
        """Return the predicted peak memory of each rank; see `StrategyFacts`."""
        return self._of_ranks(self._chosen.layout.peaks)

    def lighter_plans(self) -> "list[LighterPlan]":
        """Return plans that need less memory; see `StrategyFacts`."""
        return [plan._replace(peaks=self._of_ranks(plan.peaks)) for plan in self._chosen.layout.lighter]

    def _of_ranks(self, by_stage: "Sequence[PeakMemory]") -> "list[PeakMemory]":
        placement = self.placed.runner.placement
        return [by_stage[placement.place(rank).stage] for rank in range(placement.world_size)] if by_stage else []

    def parameters_of_stages(self) -> list[int]:
        """Return the numbers of parameters that the devices of each stage hold."""
        division = self.placed.division
        counts = [0] * division.stages
        for _, stage, tensor in division.tensors():
            counts[stage] += tensor.numel() if isinstance(tensor, nn.Parameter) else 0
        return counts

    # The end

    def end(self, has_failed: bool) -> bool:
        """Bring the whole network back to all ranks. After a failure each rank keeps the values that it has.

        Args:
            has_failed: Whether the run has failed.

        Returns:
            Whether each rank has the values of its own stage only.
        """
        runners = [] if self._forward is None else self._forward.runners
        # If the set-up has failed, there is nothing to bring back, and the other ranks may have ended.
        self._replaced.close()
        if self.values is not None and not has_failed:
            self.values.restore(self._optimizers)
            bring_kept_values(self._places, self._module, self._callbacks)
            self._entered.close()
            self._connections.close()
            for runner in runners:
                runner.close()
        self._entered.close()
        return self.values is not None and has_failed


def _remove(callbacks: list[Callback], *kinds: type[Callback]) -> None:
    """Remove the callbacks of some classes from a list."""
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, kinds)]


DEPTH = 8  # Largest number of objects and containers around a tensor.
LONG = 10_000  # A longer list is only searched if it begins with a tensor.
BYTES = 1 << 26  # Tensors of about this number of bytes are sent together.
# First names of the packages whose objects are not searched, except modules and callbacks.
LIBRARIES = ("torch", "lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics", "numpy", "cnnstrategies")
# Data, and objects that belong to the whole run.
NOT_SEARCHED = (
    *(str, bytes, int, float, type(None), type, Dataset, DataLoader, LightningDataModule, Trainer),
    *(nn.UninitializedParameter, nn.UninitializedBuffer),
)


def bring_kept_values(places: Places, module: nn.Module, callbacks: Iterable[Any]) -> None:
    """Give all ranks the values of tensors in attributes of a module and of callbacks. All ranks must call this.

    The tensors may be in lists, tuples, dictionaries and objects of the user's own classes. If the ranks have kept
    different tensors, for example because only rank 0 has kept a tensor, nothing is sent.

    Args:
        places: The rules of this rank.
        module: The module, whose parameters and buffers already have their values on all ranks.
        callbacks: The trainer's callbacks.
    """
    seen = {id(tensor) for _, tensor in tensors_of(module)}
    tensors = [tensor for holder in (module, *callbacks) for tensor in _tensors_in(holder, seen, 0)]
    kept = [tensor for tensor in tensors if places.place_of(tensor) is not None]
    forms = [(tuple(tensor.shape), str(tensor.dtype), places.place_of(tensor)) for tensor in kept]
    everyone = places.exchange(forms, range(places.world_size), "kept values")
    if any(other != forms for other in everyone):
        return
    part: list[Tensor] = []
    for tensor in kept:
        part.append(tensor)
        if sum(each.nbytes for each in part) > BYTES:
            _bring(places, part)
            part = []
    _bring(places, part)


def _bring(places: Places, tensors: list[Tensor]) -> None:
    by_place: dict[tuple[int, ...], list[Tensor]] = {}
    for tensor in tensors:
        by_place.setdefault(places.place_of(tensor) or (), []).append(tensor)
    for place, of_place in sorted(by_place.items()):
        # The names of tensors may differ between ranks, so the message has no names.
        values = places.tell(place, partial(list, of_place), "kept values", f"{len(of_place)} tensors")
        for tensor, value in zip(of_place, values, strict=True):
            if isinstance(tensor, ForeignTensor):
                with places.local():
                    try:
                        swap_contents(tensor, value.to(tensor.device))
                    except RuntimeError:  # A weak reference to the tensor exists, or an autograd graph uses the tensor.
                        continue


def _tensors_in(value: Any, seen: set[int], depth: int) -> Iterator[Tensor]:
    """Yield the tensors in an object, in an order that is the same on all ranks."""
    if depth > DEPTH or id(value) in seen or isinstance(value, NOT_SEARCHED):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple, deque)):
        is_long_table = len(value) > LONG and not isinstance(value[0], Tensor)
        items = () if is_long_table else value
    elif isinstance(value, nn.Module):
        # Submodules do not count as further levels of nesting.
        modules = list(value.modules())
        seen.update(map(id, modules))
        items = [item for module in modules for item in vars(module).values()]
    elif isinstance(value, Callback) or _is_users(value):
        items = vars(value).values()
    for item in list(items):
        yield from _tensors_in(item, seen, depth + 1)


def _is_users(value: Any) -> bool:
    """Whether an object is an instance of a class of the user, with attributes."""
    package = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and package not in LIBRARIES
