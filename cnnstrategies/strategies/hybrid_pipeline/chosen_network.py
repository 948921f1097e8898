"""The network that a strategy divides: it is found and checked before the processes start, and its layout is chosen."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from cnnstrategies.pipeline.microbatches import Images
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.placed import Places
from cnnstrategies.strategies.hybrid_pipeline.checks import check_layout_of, check_state
from cnnstrategies.strategies.hybrid_pipeline.example_inputs import example_inputs, is_attached, on_device_of
from cnnstrategies.strategies.hybrid_pipeline.layout import ChosenLayout, LayoutRequest
from cnnstrategies.strategies.hybrid_pipeline.network import find_network, module_at
from cnnstrategies.strategies.hybrid_pipeline.order import FIRST_ORDER, check_run_ahead, order_of
from cnnstrategies.strategies.hybrid_pipeline.own_stage import (
    NetworkPlan,
    check_plan,
    own_stage_alone,
    plan_network,
    refuse_meta,
)


class ChosenNetwork:
    """The network that a strategy divides, in all runs of the strategy.

    Args:
        request: The strategy's options that say how the network is divided.
        submodule: Path of the network; None for the default.
        start_method: How the ranks are started.
    """

    def __init__(self, request: LayoutRequest, submodule: str | None, start_method: str) -> None:
        self.request, self._submodule, self._start_method = request, submodule, start_method
        self._checked: LightningModule | None = None  # The last module that has been checked.
        self._planned: NetworkPlan | None = None  # The network that `configure_model` will build.
        self._apart: LightningModule | None = None  # The module, if each rank has built its own stage only.
        self._layout: tuple[nn.Module, ChosenLayout] | None = None

    def path(self, module: LightningModule) -> str:
        """Return the path of a module's network."""
        return find_network(module, self._submodule)

    def network(self, module: LightningModule) -> nn.Module:
        """Return a module's network."""
        return module_at(module, self.path(module))

    def example(self, module: LightningModule, size: int) -> Images | None:
        """Return example inputs of the network; None if they are not known, as before the module has a trainer."""
        if not is_attached(module):
            return None
        path = self.path(module)
        images = example_inputs(module, path, size)
        return None if images is None else on_device_of(module_at(module, path), images)

    # Checks before the processes start, and again in the ranks

    def check(self, module: LightningModule, devices: int, device: torch.device, before_setup: bool) -> None:
        """Refuse a module that cannot be divided as requested, if the module has not been checked yet.

        Args:
            module: The module.
            devices: Number of devices.
            device: Device of this rank.
            before_setup: Whether the processes have not been started. What only the ranks know is checked later.

        Raises:
            ConfigurationError: The module cannot be divided.
        """
        if module is self._checked:
            return
        try:
            self._planned = plan_network(
                module, self._submodule, device if is_attached(module) else torch.device("cpu")
            )
        except Exception:
            if before_setup:
                return  # The code may need what its setup makes in the ranks, which check again.
            raise
        built = module
        if self._planned is not None:
            check_plan(self.request, self._start_method)
            built = self._planned.module
        path = self.path(built)
        check_state(built, path)
        check_run_ahead(self.request.run_ahead, built, self.request.schedule)
        network = module_at(built, path)
        if self._planned is None:
            refuse_meta(built, path)
        if before_setup and not is_attached(built) and not any(True for _ in network.parameters()):
            return
        if check_layout_of(self.request, network, devices, partial(self.example, built)):
            self._checked = module  # Otherwise the ranks, which have the data, check again.

    def check_job(self, module: LightningModule, devices: int) -> None:
        """Check whether a module can be divided among a number of devices, as far as this is known without a trainer.

        Raises:
            ConfigurationError: The module cannot be divided.
        """
        check_layout_of(self.request, self.network(module), devices, partial(self.example, module))

    def check_again(self) -> None:
        """Have the next run check its module, even if this is the module of the last run."""
        self._checked = None

    # Each rank's own stage

    @contextmanager
    def building(self, module: LightningModule, places: Places, placement: Placement) -> Iterator[None]:
        """Return a context in which a module's ``configure_model`` builds this rank's own stage of the network.

        Args:
            module: The module, which has been checked.
            places: The rules of this rank.
            placement: Numbering of the ranks.
        """
        plan, self._planned = self._planned, None
        if plan is None:
            yield
            return
        with own_stage_alone(plan, module, places, placement, self.request) as built:
            yield
        if built:
            self._apart = module
        else:
            self.check_again()

    def is_whole(self, module: LightningModule) -> bool:
        """Whether each rank has built the whole network of a module, and not its own stage only."""
        return self._apart is None or self._apart is not module

    # The layout

    def choose_layout(self, trainer: Trainer, device: torch.device) -> ChosenLayout:
        """Return the layout of a run. If the cuts are automatic, all ranks must call this, and rank 0 chooses.

        Args:
            trainer: The trainer.
            device: Device of this rank.
        """
        module = trainer.lightning_module
        network = self.network(module)
        if self._layout is None or self._layout[0] is not network:
            request, first = replace(self.request, schedule=FIRST_ORDER), None
            if request.activation_checkpointing is None:
                # The prediction is for the order in which most steps run. The first steps run as `saves_memory` says.
                request, first = replace(request, schedule=order_of(module, self.request.schedule)), FIRST_ORDER
            example = partial(self.example, module)
            layout = request.choose(network, trainer, trainer.world_size, device, example, first)
            self._layout = network, layout
        return self._layout[1]

    def keep_cuts(self) -> None:
        """Do not compare the cuts with the profile in further runs with the same network."""
        assert self._layout is not None
        self._layout = self._layout[0], replace(self._layout[1], planned=False, recut=None)

    @property
    def layout(self) -> ChosenLayout:
        """The layout of the last run, after its set-up."""
        assert self._layout is not None, "the strategy has been set up"
        return self._layout[1]
