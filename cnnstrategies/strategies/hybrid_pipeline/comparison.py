"""Before training: the stages, one after another, must compute what the whole network computes."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch import Images
from cnnstrategies.pipeline.preserved import preserved
from cnnstrategies.pipeline.stage import IMAGES, Blueprint, divide_by_names
from cnnstrategies.pipeline.tracing import mode
from cnnstrategies.strategies.hybrid_pipeline.example import on_device_of

# How far two ways to add up the same numbers may be apart, in parts of the greatest of them.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_LOWER = 0.1
COMPARED = 2  # Samples; batch normalisation refuses to train on one.


def compare_on_rank_zero(
    network: nn.Module, cuts: Sequence[str | int], images: Images | None, trainer: Trainer
) -> None:
    """Have rank 0 compare, and all refuse what it refuses; a collective.

    Args:
        network: The whole network.
        cuts: Where it is cut.
        images: One microbatch; None where there is none before training.
        trainer: The trainer.

    Raises:
        ConfigurationError: The stages compute something else.
    """
    refusal: list[str | None] = [None]
    if trainer.global_rank == 0 and images is not None:
        try:
            compare(divide_by_names(network, cuts), on_device_of(network, images))
        except ConfigurationError as error:
            refusal = [str(error)]
    if trainer.world_size > 1:
        dist.broadcast_object_list(refusal, 0)
    if refusal[0] is not None:
        raise ConfigurationError(refusal[0])


def compare(blueprint: Blueprint, images: Images) -> None:
    """Compare outputs in both modes, and in training each parameter's gradient; the network is left as it was.

    Args:
        blueprint: The division of the network.
        images: One microbatch, on the network's device.

    Raises:
        ConfigurationError: They differ.
    """
    network = blueprint.network
    arguments = images if isinstance(images, tuple) else (images,)
    name = type(network).__name__
    shapes = {path: buffer.shape for path, buffer in network.named_buffers()}
    for training in (True, False):
        when = "in training" if training else "in evaluation"
        try:
            with preserved(network), _mode(network, training):
                expected, whole = _results(network, lambda: network(*arguments), training)
                resized = [path for path, buffer in network.named_buffers() if buffer.shape != shapes.get(path)]
        except Exception as error:
            # It may run where it will train, and not here.
            rank_zero_warn(
                f"{name} was not compared with its stages: {when} it fails on {len(arguments[0])} samples of shape "
                f"{tuple(arguments[0].shape[1:])} on {arguments[0].device}: {error!r}"
            )
            continue
        if resized:
            raise ConfigurationError(
                f"{name} puts a buffer of another shape in the place of {resized[0]} when it runs: a network that is "
                "cut into stages must keep the shapes of its buffers; make it for images of this size, or use "
                "strategy ddp"
            )
        try:
            with preserved(network), _mode(network, training):
                actual, divided = _results(network, partial(_in_stages, blueprint, images), training)
        except Exception as error:
            _refuse(name, f"{when} fails: {error!r}")
        if len(expected) != len(actual):
            _refuse(name, f"{when} returns {len(actual)} values in place of {len(expected)}")
        for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
            if _differ(one, other):
                _refuse(name, f"{when} returns another value than the whole (number {index})")
        for parameter, gradient in whole.items():
            if _differ(gradient, divided[parameter]):
                _refuse(name, f"gives {parameter} another gradient than the whole")


def _mode(network: nn.Module, training: bool) -> AbstractContextManager[None]:
    """The modes of training, in which the user may have some modules in evaluation; or all in evaluation."""
    return nullcontext() if training and network.training else mode(network, training)


def _refuse(name: str, what: str) -> NoReturn:
    raise ConfigurationError(
        f"{name}, cut into stages, {what}: its forward depends on something that a trace fixes, such as an attribute "
        "that hooks change, values taken out of tensors (.item(), .data, numpy) or a function of another library; "
        "rewrite that, wrap it in a module of its own that subclasses a torch.nn module, or use strategy ddp"
    )


def _results(network: nn.Module, run: Callable[[], Any], training: bool) -> tuple[list[Any], dict[str, Tensor | None]]:
    """What a run returns, and the gradients of random multiples of it."""
    for parameter in network.parameters():
        parameter.grad = None
    torch.manual_seed(0)
    with torch.set_grad_enabled(training):
        outputs = run()
    leaves = tree_leaves(outputs)
    roots = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    generator = torch.Generator().manual_seed(0)
    if roots:
        noise = [torch.randn(root.shape, generator=generator).to(root) for root in roots]
        torch.autograd.backward(roots, noise)
    values = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return values, {name: parameter.grad for name, parameter in network.named_parameters()}


def _in_stages(blueprint: Blueprint, images: Images) -> Any:
    training = blueprint.network.training
    values: dict[str, Any] = {IMAGES: images}
    result: Any = None
    for index, stage in enumerate(blueprint.division(training).stages):
        result = blueprint.build(index)(*(values[name] for name in stage.inputs))
        values |= dict(zip(stage.outputs, result, strict=True)) if stage.outputs else {}
    return result


def _differ(expected: Any, actual: Any) -> bool:
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return (expected is None) != (actual is None) if expected is None or actual is None else expected != actual
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return True
    if not expected.is_floating_point():
        return not torch.equal(expected, actual)
    if not expected.numel():
        return False
    allowed = _TOLERANCE.get(expected.dtype, _LOWER) * float(expected.abs().max())
    same_numbers = torch.equal(torch.isfinite(expected), torch.isfinite(actual))
    distance = (expected - actual).nan_to_num(0.0, 0.0, 0.0).abs().max()
    return not same_numbers or float(distance) > allowed
