"""What the first stage gives the network: parts of the batch, or what the step computes from them before the call.

From which parts is found by running the step, on a copy of the module, up to the call.
"""

import inspect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.samples import count_samples
from cnnstrategies.pipeline.batch import Batch, Images
from cnnstrategies.pipeline.fixed import random_numbers
from cnnstrategies.pipeline.tracing import network_inputs
from cnnstrategies.strategies.hybrid_pipeline.batches import Form, as_given, first_rows, flatten, form_of, take_apart
from cnnstrategies.strategies.hybrid_pipeline.shadow import (
    NoCollectives,
    copy_metrics,
    same_random_numbers,
    shadow_of,
)
from cnnstrategies.strategies.hybrid_pipeline.stand_ins import ImagesElsewhere, described, one_of

STEPS = {
    RunningStage.TRAINING: "training_step",
    RunningStage.SANITY_CHECKING: "validation_step",
    RunningStage.VALIDATING: "validation_step",
    RunningStage.TESTING: "test_step",
    RunningStage.PREDICTING: "predict_step",
}
_SAME = 1e-4  # How far rows may be apart that were computed with others beside them, in parts of the greatest.
_ELSEWHERE = "do it in on_after_batch_transfer, which runs where the images are and sees the targets, too"


class _CallSeen(BaseException):
    """Ends a step; no ``except Exception`` of the step's own catches it."""


class _Recorder(nn.Module):
    """Takes the network's place and keeps what it is called with; all else that a step asks for is the network's."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._network = [network]  # Hidden, for its layers are none of this module's.

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_network"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.call = (args, kwargs)
        raise _CallSeen


@dataclass(frozen=True)
class Wiring:
    """How a step comes to the network's inputs.

    Attributes:
        inputs: The batch's leaves that it gives the network, in the order of the network's arguments; or from which it
            computes what it gives.
        computed: Shape of a row and type of each input that it computes; none where it gives parts of the batch.
    """

    inputs: tuple[int, ...]
    computed: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()


class Inputs:
    """Makes a module's inputs of its network, on a rank of the first stage with so many replicas."""

    def __init__(
        self, module: LightningModule, path: str, network: nn.Module, device: torch.device, replicas: int = 1
    ) -> None:
        self._module: Any = module
        self._path = path
        self._network = network
        self._device = device
        self._replicas = replicas
        self._wirings: dict[Hashable, Wiring] = {}
        self._epoch: int | None = None
        self._loaded: Any = None

    def take(self, batch: Any, dataloader: int) -> tuple[Images, tuple[Tensor, ...], Form]:
        """Take a batch that this rank has loaded apart: images, what else has a row for each sample, and its form.

        Of images that the step computes they are the form alone; :meth:`compute` makes them.
        """
        trainer = self._module.trainer
        step = STEPS[trainer.state.stage or RunningStage.TRAINING]
        if self._epoch != trainer.current_epoch:
            self._epoch = trainer.current_epoch
            self._wirings.clear()  # A step may begin to augment in some epoch.
        wiring = self._known_wiring(step, batch, dataloader)
        images, rest, form = take_apart(batch, wiring.inputs, bool(wiring.computed))
        if wiring.computed:
            self._loaded = batch
            rows = len(flatten(batch)[0][wiring.inputs[0]])
            images = as_given(
                [torch.empty((rows, *shape), dtype=dtype, device="meta") for shape, dtype in wiring.computed]
            )
        return images, rest, form

    def compute(self, batch: Batch, step: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
        """The global batch with what the step, about to be called so, computes for the network."""
        if batch.images is None or not form_of(batch).computes:
            return batch
        loaded, self._loaded = self._loaded, None
        before = random_numbers(self._device)
        images = self._given(step, *with_batch(loaded, args, kwargs), shows_errors=True) or []
        expected = [*zip(batch.image_shapes, batch.image_dtypes, strict=True)]
        if [(tuple(one.shape[1:]), one.dtype) for one in images] != expected:
            raise ConfigurationError(
                f"{step} gives the network tensors of other shapes or types in each step, computed from such of one: "
                "the stages agree on them before; do it in on_after_batch_transfer, which runs where the images are"
            )
        if random_numbers(self._device) != before:
            raise _draws(step)
        return replace(batch, images=as_given(images))

    def of_a_batch(self, batch: Any) -> Images:
        """What ``training_step`` gives the network for a batch; random numbers are used up."""
        wiring = self.wiring("training_step", batch, 0)
        images = [flatten(batch)[0][index] for index in wiring.inputs]
        if wiring.computed:
            images = self._given("training_step", self._arguments("training_step", batch, 0)) or images
        return as_given(images)

    def wiring(self, step: str, batch: Any, dataloader: int) -> Wiring:
        """How a step comes to what it gives: it runs up to the call as it is, and with a stand-in for each tensor.

        Where that does not tell, the network gets the first tensors of the batch; if the step does something else, it
        says so when it runs.
        """
        leaves, tree = flatten(batch)
        samples = count_samples(batch)
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.ndim]
        names = network_inputs(self._network)
        run = partial(self._run, step, tree=tree, dataloader=dataloader)
        given, draws = run(leaves)
        as_loaded: list[set[int]] = [set() for _ in names]
        sources: set[int] = set()
        for index in tensors if given is not None else []:
            leaf = leaves[index]
            if len(leaf) == samples:
                stand_in = ImagesElsewhere.like(samples, leaf.shape[1:], leaf.dtype, leaf.device, index, computes=True)
                found, _ = run([stand_in if other == index else one for other, one in enumerate(leaves)])
                for number, value in enumerate(found or []):
                    if isinstance(value, ImagesElsewhere):
                        sources.add(index)
                        if value.is_as_loaded:
                            as_loaded[number].add(index)
        if all(len(found) == 1 for found in as_loaded) and not draws:
            return Wiring(tuple(index for found in as_loaded for index in found))
        if given is None or not sources:
            return Wiring(self._first_tensors(batch, leaves, tensors))
        name = f"{type(self._module).__name__}.{step}"
        for value in given:
            if not isinstance(value, Tensor) or not value.ndim or len(value) != samples:
                raise ConfigurationError(
                    f"{name} gives the network {described(value)} for a batch of {samples} samples: cut into stages, "
                    "it takes tensors with one row for each sample (several views of an image are several inputs of "
                    "the network)"
                )
        if draws:
            raise _draws(name)
        if self._replicas > 1 and samples > 1:
            half, _ = run(flatten(first_rows(batch, samples // 2))[0])
            if half is None or any(_differ(one[: samples // 2], other) for one, other in zip(given, half, strict=True)):
                raise ConfigurationError(
                    f"what {name} gives the network for a sample depends on the other samples of the batch, of which "
                    f"each of the {self._replicas} replicas of the first stage has a part: {_ELSEWHERE}, or give the "
                    "first stage one replica"
                )
        return Wiring(tuple(sorted(sources)), tuple((tuple(one.shape[1:]), one.dtype) for one in given))

    def _known_wiring(self, step: str, batch: Any, dataloader: int) -> Wiring:
        leaves, tree = flatten(batch)
        key = (step, dataloader, str(tree))
        # What is computed has other shapes where the batch has.
        own = (*key, *((leaf.shape[1:], leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor)))
        for known in (key, own):
            if known in self._wirings:
                return self._wirings[known]
        with self._module.trainer.precision_plugin.forward_context():
            wiring = self.wiring(step, batch, dataloader)
        self._wirings[own if wiring.computed else key] = wiring
        return wiring

    def _first_tensors(self, batch: Any, leaves: Sequence[Any], tensors: Sequence[int]) -> tuple[int, ...]:
        """As many of a batch's tensors as the network takes."""
        if leaves[0] is batch and not isinstance(batch, Tensor):
            raise ConfigurationError(
                f"a batch is a {type(batch).__name__}, whose tensors strategy hybrid_pipeline does not find: have "
                "the dataset or collate_fn return a tuple, list or dict of tensors with one row per sample"
            )
        names = network_inputs(self._network)
        if len(tensors) < len(names):
            kinds = [f"Tensor{tuple(one.shape)}" if isinstance(one, Tensor) else type(one).__name__ for one in leaves]
            raise ConfigurationError(
                f"a batch is a {type(batch).__name__} of {', '.join(kinds)}, and the network takes "
                f"{' and '.join(names)}: strategy hybrid_pipeline takes batches of tensors with one row per sample, in "
                "tuples, lists or dicts"
            )
        return tuple(tensors[: len(names)])

    def _run(self, step: str, leaves: Sequence[Any], tree: Any, dataloader: int) -> tuple[list[Any] | None, bool]:
        """What the network is given, and whether random numbers were drawn for it; the batch stays as it is."""
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        with same_random_numbers(self._device), NoCollectives(self._module, step) as watched:
            before = random_numbers(self._device)
            given = self._given(step, self._arguments(step, tree_unflatten(copies, tree), dataloader))
            drawn = random_numbers(self._device) != before
        if watched.refusal is not None:
            raise watched.refusal
        return given, drawn

    def _given(
        self,
        step: str,
        arguments: Sequence[Any],
        options: Mapping[str, Any] | None = None,
        shows_errors: bool = False,
    ) -> list[Any] | None:
        """What a step gives the network, in the order of the network's arguments.

        None where the step does not come to call it, or not as the network can be called. Errors that are not shown
        come again when the step runs in full.
        """
        recorder = _Recorder(self._network)
        recorder.training = self._module.training
        shadow = shadow_of(self._module, self._path, recorder, copy_metrics(self._module))
        try:
            with torch.no_grad():
                getattr(shadow, step)(*arguments, **(options or {}))
        except _CallSeen:
            pass
        except Exception:
            if shows_errors:
                raise
        if recorder.call is None:
            return None
        try:
            bound = inspect.signature(self._network.forward).bind(*recorder.call[0], **recorder.call[1])
        except TypeError:
            return None
        return [one_of(bound.arguments.get(name)) for name in network_inputs(self._network)]

    def _arguments(self, step: str, batch: Any, dataloader: int) -> list[Any]:
        """What a trainer calls a step with, as far as the step takes it."""
        parameters = inspect.signature(getattr(self._module, step)).parameters.values()
        wanted = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
        return [batch, 0, dataloader][: max(1, len(wanted))]


def with_batch(batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """A step's arguments with another batch in the place of theirs."""
    return ([batch, *args[1:]], dict(kwargs)) if args else ([], {**kwargs, "batch": batch})


def _draws(step: str) -> ConfigurationError:
    return ConfigurationError(
        f"{step} draws random numbers before it calls the network, where the steps of the other ranks would draw "
        f"others: {_ELSEWHERE}"
    )


def _differ(one: Any, other: Any) -> bool:
    if one.shape != other.shape:
        return True
    if not one.is_floating_point():
        return not torch.equal(one, other)
    allowed = max(_SAME, 8 * torch.finfo(one.dtype).eps) * one.abs().max()
    return bool((one - other).abs().max() > allowed) if one.numel() else False
