"""From which parts of a batch a step makes what it gives the network: found by running it up to the call."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.samples import count_samples
from cnnstrategies.pipeline.tracing import network_inputs
from cnnstrategies.strategies.hybrid_pipeline.batches import first_rows, flatten
from cnnstrategies.strategies.hybrid_pipeline.images import ImagesElsewhere
from cnnstrategies.strategies.hybrid_pipeline.shadow import (
    NoCollectives,
    RandomNumbers,
    copy_metrics,
    same_random_numbers,
    shadow_of,
)

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
        draws: Whether it draws random numbers on the way.
    """

    inputs: tuple[int, ...]
    computed: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    draws: bool = False


class NetworkCalls:
    """What a module's steps give its network: each runs, on a copy of the module, up to the call."""

    def __init__(self, module: LightningModule, path: str, network: nn.Module) -> None:
        self.module = module
        self.path = path
        self.network = network

    def given(
        self,
        step: str,
        arguments: Sequence[Any],
        options: Mapping[str, Any] | None = None,
        shows_errors: bool = False,
    ) -> list[Any] | None:
        """What a step gives the network, in the order of the network's arguments; its random numbers are used up.

        None where the step does not come to call it, or not as the network can be called. Errors that are not shown
        come again when the step runs in full.
        """
        recorder = _Recorder(self.network)
        recorder.training = self.module.training
        shadow = shadow_of(self.module, self.path, recorder, copy_metrics(self.module))
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
            bound = inspect.signature(self.network.forward).bind(*recorder.call[0], **recorder.call[1])
        except TypeError:
            return None
        return [one_of(bound.arguments.get(name)) for name in network_inputs(self.network)]

    def wiring(self, step: str, batch: Any, dataloader: int, device: torch.device, replicas: int = 1) -> Wiring:
        """How a step comes to what it gives: it runs up to the call as it is, and with a stand-in for each tensor.

        Where that does not tell, the network gets the first tensors of the batch; if the step does something else, it
        says so when it runs.
        """
        leaves, tree = flatten(batch)
        samples = count_samples(batch)
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.ndim]
        names = network_inputs(self.network)
        run = partial(self._run, step, tree=tree, dataloader=dataloader, device=device)
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
            if leaves[0] is batch and not isinstance(batch, Tensor):
                raise ConfigurationError(
                    f"a batch is a {type(batch).__name__}, whose tensors strategy hybrid_pipeline does not find: have "
                    "the dataset or collate_fn return a tuple, list or dict of tensors with one row per sample"
                )
            if len(tensors) < len(names):
                raise ConfigurationError(
                    f"a batch is a {_described(batch)}, and the network takes {' and '.join(names)}: strategy "
                    "hybrid_pipeline takes batches of tensors with one row per sample, in tuples, lists or dicts"
                )
            return Wiring(tuple(tensors[: len(names)]))
        _check(f"{type(self.module).__name__}.{step}", given, draws, samples, replicas)
        if replicas > 1 and samples > 1:
            half, _ = run(flatten(first_rows(batch, samples // 2))[0])
            if half is None or any(_differ(one[: samples // 2], other) for one, other in zip(given, half, strict=True)):
                raise ConfigurationError(
                    f"what {type(self.module).__name__}.{step} gives the network for a sample depends on the other "
                    f"samples of the batch, of which each of the {replicas} replicas of the first stage has a part: "
                    f"{_ELSEWHERE}, or give the first stage one replica"
                )
        computed = tuple((tuple(one.shape[1:]), one.dtype) for one in given)
        return Wiring(tuple(sorted(sources)), computed, draws)

    def _run(
        self, step: str, leaves: Sequence[Any], tree: Any, dataloader: int, device: torch.device
    ) -> tuple[list[Any] | None, bool]:
        """What the network is given, and whether random numbers were drawn for it; the batch stays as it is."""
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        with same_random_numbers(device):
            before = RandomNumbers(device)
            arguments = arguments_of(self.module, step, tree_unflatten(copies, tree), 0, dataloader)
            with NoCollectives(self.module, step) as watched:
                given = self.given(step, arguments)
            if watched.refusal is not None:
                raise watched.refusal
            return given, RandomNumbers(device) != before


def one_of(value: Any) -> Any:
    """An argument; of ``*args`` the only one."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def arguments_of(module: LightningModule, step: str, batch: Any, index: int, dataloader: int) -> list[Any]:
    """What a trainer calls a step with, as far as the step takes it."""
    parameters = inspect.signature(getattr(module, step)).parameters.values()
    wanted = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
    return [batch, index, dataloader][: max(1, len(wanted))]


def _check(name: str, given: Sequence[Any], draws: bool, samples: int, replicas: int) -> None:
    """Refuse what the stages cannot take: no tensor, other rows than the batch, or drawn by each replica for itself."""
    for value in given:
        if not isinstance(value, Tensor) or not value.ndim or len(value) != samples:
            raise ConfigurationError(
                f"{name} gives the network {_form(value)} for a batch of {samples} samples: cut into stages, it takes "
                "tensors with one row for each sample (several views of an image are several inputs of the network)"
            )
    if draws and replicas > 1:
        raise ConfigurationError(
            f"{name} draws random numbers before it calls the network: the first stage has {replicas} replicas, which "
            f"would draw other ones than the steps of the other ranks; {_ELSEWHERE}, or give the first stage one "
            "replica"
        )


def _differ(one: Any, other: Any) -> bool:
    if one.shape != other.shape:
        return True
    if not one.is_floating_point():
        return not torch.equal(one, other)
    allowed = max(_SAME, 8 * torch.finfo(one.dtype).eps) * one.abs().max()
    return bool((one - other).abs().max() > allowed) if one.numel() else False


def _form(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _described(batch: Any) -> str:
    leaves, _ = flatten(batch)
    kinds = [f"Tensor{tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
    return f"{type(batch).__name__} of {', '.join(kinds)}"
