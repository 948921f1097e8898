"""Gradients that have gradients themselves, such as those of a gradient penalty, through a divided network.

The pipeline's backward computes gradients without a graph. For a backward with ``create_graph=True`` the network's own
code therefore runs again, as a whole, with the rules for placed tensors. One stage computes at a time, without
microbatches.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cnnstrategies._torch_private import without_tensor_hooks
from cnnstrategies.pipeline.buffers import BATCH_NORMS
from cnnstrategies.pipeline.network_inputs import network_inputs
from cnnstrategies.pipeline.whole_batch import tensors_in
from cnnstrategies.placed.messages import RefusedError

if TYPE_CHECKING:
    from cnnstrategies.pipeline.placed_call import PlacedCall

_KINDS = ("cpu", "cuda")


def autocast_states() -> dict[str, tuple[bool, torch.dtype]]:
    """Return, for each type of device, whether autocast is on, and its dtype."""
    return {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS}


def gradients_with_graph(call: "PlacedCall", gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients of a call's images and parameters, as functions of them and of the outputs' gradients.

    All ranks must call this.

    Args:
        call: The call of the network.
        gradients: Gradients of the tensors in the network's result.

    Raises:
        RefusedError: The network's code would compute other values than in the call.
    """
    network = call.network.division.network
    name = type(network).__name__
    for path, module in network.named_modules():
        if isinstance(module, BATCH_NORMS) and module.training:
            raise RefusedError(
                f"a gradient through {name} is computed with create_graph=True, which runs the network's code again, "
                f"but {path} is a BatchNorm layer in training mode, whose statistics would be counted twice: use "
                "another normalisation, such as GroupNorm, or call eval() on this layer"
            )
    if call.has_drawn:
        raise RefusedError(
            f"a gradient through {name} is computed with create_graph=True, which runs the network's code again, but "
            "the network draws random numbers, which would be others: set dropout to 0, or compute this gradient "
            "outside of the divided network"
        )
    arguments = call.images if len(network_inputs(network)) > 1 else (call.images,)
    parameters = list(call.parameters.values())
    inputs = [*tensors_in(call.images), *parameters]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    with ExitStack() as stack:
        for kind, (enabled, dtype) in call.autocast.items():
            stack.enter_context(torch.autocast(kind, dtype, enabled))
        stack.enter_context(without_tensor_hooks(parameters))
        call.terms.watch.begin()
        stack.callback(call.terms.watch.take)
        results = tensors_in(type(network).forward(network, *arguments))
        pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if r.requires_grad and g is not None]
        computed: Sequence[Tensor | None] = [None] * len(wanted)
        if pairs:
            roots, starts = zip(*pairs, strict=True)
            computed = torch.autograd.grad(roots, wanted, starts, create_graph=True, allow_unused=True)
    by_id = dict(zip(map(id, wanted), computed, strict=True))
    return [by_id.get(id(tensor)) for tensor in inputs]
