"""Before training: a microbatch, with which the stages, one after another, must compute what the whole network does."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cnnstrategies._lightning_private import train_loader
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.own_forward import network_at
from cnnstrategies.pipeline.batch import Images
from cnnstrategies.pipeline.fixed import preserved
from cnnstrategies.pipeline.leaf_tracer import network_inputs
from cnnstrategies.pipeline.microbatches import CPU
from cnnstrategies.pipeline.stage import IMAGES, Blueprint, divide
from cnnstrategies.pipeline.tracing import mode
from cnnstrategies.pipeline.transport import broadcast_value
from cnnstrategies.strategies.hybrid_pipeline.first_samples import (
    as_given,
    as_loaded,
    first_samples,
    is_attached,
    on_device_of,
    repeated,
)
from cnnstrategies.strategies.hybrid_pipeline.inputs import Inputs
from cnnstrategies.strategies.shadow import same_random_numbers

# How far two ways to add up the same numbers may be apart, in parts of the greatest of them. A GPU adds up in another
# order each time, and the fewer values batch normalisation sees, the more it makes of that.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOWER = 0.1
COMPARED = 4  # Samples.


def example_images(module: LightningModule, path: str, size: int) -> Images | None:
    """One microbatch of the network's inputs, of so many samples where that is open.

    It is the module's own example, repeated, noise of the size of the data's images, or samples of the training data;
    None where they cannot be known without taking them from what is trained with. No loader may have been iterated.
    """
    size = max(2, size)  # Batch normalisation refuses to train on one, which many examples have.
    network = network_at(module, path)
    names = network_inputs(network)
    example = module.example_input_array
    shape = getattr(getattr(module.trainer, "datamodule", None), "image_shape", None)
    given: tuple[Any, ...] = example if isinstance(example, tuple) else (example,)
    if len(given) == len(names) and all(isinstance(one, Tensor) for one in given):
        return repeated(as_given(given), size)
    with same_random_numbers(CPU):
        if shape is not None and len(names) == 1:
            return torch.randn(size, *shape)
        batch = first_samples(train_loader(module.trainer), size)
        return None if batch is None else _inputs(module, path, network, batch)


def example_on_device(module: LightningModule, path: str, size: int) -> Images | None:
    """The same on the network's device and of its type; None before the module has a trainer, too."""
    images = example_images(module, path, size) if is_attached(module) else None
    return None if images is None else on_device_of(network_at(module, path), images)


def _inputs(module: LightningModule, path: str, network: nn.Module, batch: Any) -> Images:
    batch = as_loaded(module, path, network, batch)
    return Inputs(module, path, network, CPU).of_a_batch(batch)


def compare_on_rank_zero(
    trainer: Trainer, path: str, cuts: Sequence[str | int], device: torch.device, whole: bool
) -> None:
    """Have rank 0 compare, and all refuse what it refuses; a collective. Nothing is compared that no rank has whole."""
    network = network_at(trainer.lightning_module, path)
    if not whole:
        rank_zero_warn(
            f"{type(network).__name__} was not compared with its stages, as no rank has built the whole: compare a "
            "small one of its kind, built in __init__"
        )
        return
    refusal = None
    if trainer.is_global_zero:
        images = example_images(trainer.lightning_module, path, COMPARED)
        try:
            if images is not None:
                compare(divide(network, cuts), images, device)
        except ConfigurationError as error:
            refusal = str(error)
    if trainer.world_size > 1:
        refusal = broadcast_value(refusal, 0, device)
    if refusal is not None:
        raise ConfigurationError(refusal)


def compare(blueprint: Blueprint, images: Images, device: torch.device) -> None:
    """Compare outputs in both modes, and in training each parameter's gradient; the network is left as it was.

    A copy is compared, on the device and in float64, where rounding shows least; one in its own type, where it takes
    no other; and the network itself where it is, if it has no room on the device or cannot be copied.
    """
    for training in (True, False):
        failure: Exception | None = None
        for make in copies(blueprint.network, device):
            try:
                with _same_each_time():
                    _compare(blueprint.of(make()), images, training)
                break
            except ConfigurationError:
                raise
            except Exception as error:
                failure = failure or error.with_traceback(None)  # It would hold what has no room.
        else:
            arguments = images if isinstance(images, tuple) else (images,)
            # It may run where it will train, and not here.
            rank_zero_warn(
                f"{type(blueprint.network).__name__} was not compared with its stages: {_when(training)} it fails on "
                f"{len(arguments[0])} samples of shape {tuple(arguments[0].shape[1:])} on {device}: {failure!r}"
            )


def copies(network: nn.Module, device: torch.device) -> list[Callable[[], nn.Module]]:
    """What makes the networks that are tried, in this order."""
    makers: list[Callable[[], nn.Module]] = [lambda: copy.deepcopy(network).to(device, torch.float64)]
    if next(network.parameters()).device != device:
        makers.append(lambda: copy.deepcopy(network).to(device))
    return [*makers, lambda: network]


@contextmanager
def _same_each_time() -> Iterator[None]:
    """With the kernels that cuDNN takes each time, and without TF32."""
    backends: Any = torch.backends
    switches = (
        (backends.cudnn, "deterministic", True),
        (backends.cudnn, "benchmark", False),
        (backends.cudnn.conv, "fp32_precision", "ieee"),
        (backends.cuda.matmul, "fp32_precision", "ieee"),
    )
    before = [getattr(owner, name) for owner, name, _ in switches]
    for owner, name, value in switches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(switches, before, strict=True):
            setattr(owner, name, value)


def _compare(blueprint: Blueprint, images: Images, training: bool) -> None:
    """Compare in one mode; what else the network raises than a refusal shows that it cannot be tried so."""
    network = blueprint.network
    images = on_device_of(network, images)
    arguments = images if isinstance(images, tuple) else (images,)
    name, when = type(network).__name__, _when(training)
    shapes = {path: buffer.shape for path, buffer in network.named_buffers()}
    with preserved(network), _mode(network, training):
        expected, whole = _results(network, lambda: network(*arguments), training)
        resized = [path for path, buffer in network.named_buffers() if buffer.shape != shapes.get(path)]
    if resized:
        raise ConfigurationError(
            f"{name} puts a buffer of another shape in the place of {resized[0]} when it runs: a network that is "
            "cut into stages must keep the shapes of its buffers; make it for images of this size, or use "
            "strategy ddp"
        )
    try:
        with preserved(network), _mode(network, training):
            actual, divided = _results(network, partial(_in_stages, blueprint, images), training)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _refuse(name, f"{when} fails: {error!r}")
    if len(expected) != len(actual):
        _refuse(name, f"{when} returns {len(actual)} values in place of {len(expected)}")
    for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if differ(one, other):
            _refuse(name, f"{when} returns another value than the whole (number {index})")
    largest = max((float(one.abs().max()) for one in whole.values() if one is not None and one.numel()), default=0.0)
    for parameter, gradient in whole.items():
        if differ(gradient, divided[parameter], largest):
            _refuse(name, f"gives {parameter} another gradient than the whole")


def _when(training: bool) -> str:
    return "in training" if training else "in evaluation"


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
    for index, stage in enumerate(blueprint.stages[training]):
        result = blueprint.build(index)(*(values[name] for name in stage.inputs))
        values |= dict(zip(stage.outputs, result, strict=True)) if stage.outputs else {}
    return result


def differ(expected: Any, actual: Any, largest: float = 0.0) -> bool:
    """Whether two values do, or two gradients of which the network's largest number is ``largest``.

    That of what batch normalisation takes out again, such as a bias before it, is zero but for rounding.
    """
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return (expected is None) != (actual is None) if expected is None or actual is None else expected != actual
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return True
    if not expected.is_floating_point():
        return not torch.equal(expected, actual)
    if not expected.numel():
        return False
    tolerance = _TOLERANCE.get(expected.dtype, _LOWER)
    allowed = tolerance * (float(expected.abs().max()) + tolerance * largest)
    same_numbers = torch.equal(torch.isfinite(expected), torch.isfinite(actual))
    distance = (expected - actual).nan_to_num(0.0, 0.0, 0.0).abs().max()
    return not same_numbers or float(distance) > allowed
