"""What the first stage gives the network: parts of the batch, or what the step computes from them before the call."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch import Batch, Images
from cnnstrategies.pipeline.transport import broadcast_value
from cnnstrategies.strategies.hybrid_pipeline.batches import Form, as_given, flatten, form_of, take_apart
from cnnstrategies.strategies.hybrid_pipeline.divided_module import DividedModule
from cnnstrategies.strategies.hybrid_pipeline.shadow import Draws, RandomNumbers
from cnnstrategies.strategies.hybrid_pipeline.wiring import NetworkCalls, Wiring

STEPS = {
    RunningStage.TRAINING: "training_step",
    RunningStage.SANITY_CHECKING: "validation_step",
    RunningStage.VALIDATING: "validation_step",
    RunningStage.TESTING: "test_step",
    RunningStage.PREDICTING: "predict_step",
}


class Inputs:
    """Makes them, on a rank of the first stage; on the others it hears of the random numbers."""

    def __init__(self, divided: DividedModule, plugin: Any) -> None:
        self._divided = divided
        self._calls = NetworkCalls(divided.module, divided.path, divided.network)
        self._plugin = plugin
        self._device = divided.pipeline.device
        self._wirings: dict[Hashable, Wiring] = {}
        self._epoch: int | None = None
        self._loaded: Any = None

    def take(self, batch: Any, dataloader: int) -> tuple[Images, tuple[Tensor, ...], Form]:
        """Take a batch that this rank has loaded apart: images, what else has a row for each sample, and its form.

        Of images that the step computes they are the form alone; :meth:`compute` makes them.
        """
        module: Any = self._divided.module
        step = STEPS[module.trainer.state.stage or RunningStage.TRAINING]
        if self._epoch != module.trainer.current_epoch:
            self._epoch = module.trainer.current_epoch
            self._wirings.clear()  # A step may begin to augment in some epoch.
        wiring = self._wiring(step, batch, dataloader)
        images, rest, form = take_apart(batch, wiring.inputs, bool(wiring.computed), wiring.draws)
        if wiring.computed:
            self._loaded = batch
            rows = len(flatten(batch)[0][wiring.inputs[0]])
            images = as_given(
                [torch.empty((rows, *shape), dtype=dtype, device="meta") for shape, dtype in wiring.computed]
            )
        return images, rest, form

    def compute(
        self, batch: Batch, step: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Batch, Draws | None]:
        """Make what the step computes for the network, by running it up to the call; a collective where it draws.

        Returns:
            The batch with the images, and the random numbers that the step draws, which every rank gets.
        """
        form = form_of(batch)
        if not form.computes:
            return batch, None
        drawn: Draws | None = None
        if batch.images is not None:
            start = RandomNumbers(self._device)
            images = self._images(step, args, kwargs)
            drawn = Draws(start, RandomNumbers(self._device))
            _check(step, batch, images, not form.draws and start != drawn.at_call)
            batch = replace(batch, images=as_given(images))
        if not form.draws:
            return batch, None
        pipeline = self._divided.pipeline
        if pipeline.placement.world_size > 1:
            # It has one replica then: see `NetworkCalls.wiring`.
            drawn = broadcast_value(drawn, pipeline.placement.ranks(0)[0], group=pipeline.transport.control)
        return batch, drawn

    def _images(self, step: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        loaded, self._loaded = self._loaded, None
        return self._calls.given(step, *with_batch(loaded, args, kwargs), shows_errors=True) or []

    def _wiring(self, step: str, batch: Any, dataloader: int) -> Wiring:
        leaves, tree = flatten(batch)
        key = (step, dataloader, str(tree))
        # What is computed has other shapes where the batch has.
        own = (*key, *((leaf.shape[1:], leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor)))
        for known in (key, own):
            if known in self._wirings:
                return self._wirings[known]
        replicas = self._divided.pipeline.placement.replicas[0]
        with self._plugin.forward_context():
            wiring = self._calls.wiring(step, batch, dataloader, self._device, replicas)
        self._wirings[own if wiring.computed else key] = wiring
        return wiring


def with_batch(batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """A step's arguments with another batch in the place of theirs."""
    return ([batch, *args[1:]], dict(kwargs)) if args else ([], {**kwargs, "batch": batch})


def _check(step: str, batch: Batch, images: Sequence[Any], draws: bool) -> None:
    expected = [*zip(batch.image_shapes, batch.image_dtypes, strict=True)]
    if [(tuple(one.shape[1:]), one.dtype) for one in images] != expected:
        raise ConfigurationError(
            f"{step} gives the network tensors of other shapes or types in each step, computed from such of one: the "
            "stages agree on them before; do it in on_after_batch_transfer, which runs where the images are"
        )
    if draws:
        raise ConfigurationError(
            f"{step} draws random numbers before it calls the network in some steps of an epoch, and not in its first: "
            "do it in each, or in on_after_batch_transfer, which runs where the images are"
        )
