"""What a strategy may do sooner or later than one device would, because nobody looks in between.

On one device each hook of a step finds the gradients and the weights as they are then. A strategy that sends a gradient
before the hooks have run, or takes a value after the step, is right only where no such hook is anybody else's. Those of
Lightning and of this package are known; every other one counts as if it read and wrote all there is.
"""

from collections.abc import Iterable

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelPruning, WeightAveraging

KNOWN = ("lightning.", "cnnstrategies.")  # packages
READERS = (WeightAveraging, ModelPruning)  # of Lightning's, those that read or write weights after each step
# Between backward and the optimizer's step, or in its place.
GRADIENT_HOOKS = ("backward", "on_after_backward", "on_before_optimizer_step", "optimizer_step")
# Between two steps, or around them.
WEIGHT_HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "optimizer_step"),
)


def who_sees_gradients(module: LightningModule, callbacks: Iterable[Callback]) -> list[str]:
    """The hooks that may read or change gradients before the optimizer's step, such as ``Clip.on_after_backward``.

    Args:
        module: What is trained.
        callbacks: The trainer's.
    """
    return [f"{type(one).__name__}.{name}" for one in (module, *callbacks) for name in own_hooks(one, GRADIENT_HOOKS)]


def who_sees_weights(module: LightningModule, callbacks: Iterable[Callback]) -> list[str]:
    """The hooks that may read or change weights between two steps; see :func:`who_sees_gradients`."""
    seen = [f"{type(one).__name__}.{name}" for one in (module, *callbacks) for name in own_hooks(one, WEIGHT_HOOKS)]
    return seen + [type(one).__name__ for one in callbacks if isinstance(one, READERS)]


def own_hooks(one: object, hooks: Iterable[str]) -> list[str]:
    """The hooks of a module or callback that are neither Lightning's nor this package's.

    Args:
        one: It.
        hooks: The names among which to look.
    """
    found = []
    for name in hooks:
        owner = next((kind for kind in type(one).__mro__ if name in vars(kind)), None)
        if name in vars(one) or (owner is not None and not f"{owner.__module__}.".startswith(KNOWN)):
            found.append(name)
    return found
