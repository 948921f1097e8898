"""Run the stages of a network one after the other with a few samples, and compare the result with the network's.

A stage runs on ranks of its own, and finds nothing that the forward of another stage has stored or changed in the same
call. If a network's forward passes values between its modules in another way than as arguments and results, for example
through a global variable, the stages compute something else. This comparison notices it before training.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.combining import is_near, is_number, is_same
from cnnstrategies.pipeline.division import Division
from cnnstrategies.pipeline.first_forward import NotedParameters
from cnnstrategies.pipeline.network_inputs import network_inputs
from cnnstrategies.pipeline.stage import IMAGES, copy_value
from cnnstrategies.pipeline.stored_watch import StoredWatch
from cnnstrategies.pipeline.untouched import Untouched
from cnnstrategies.pipeline.watched import StoredKey
from cnnstrategies.runtime.generator_states import GeneratorStates

REHEARSED = 4  # Number of samples.
# With more elements in a sample, `FEWER` samples are used. The comparison of a U-Net with images of 512 x 512 would
# otherwise take longer than its profile.
LARGE, FEWER = 2**18, 2
# Largest difference, relative to the largest element. A GPU adds numbers in another order in each run.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.complex128: 1e-6, torch.complex64: 1e-3}
_TOLERANCE_OF_OTHERS = 0.1


def rehearsed(images: Any) -> Any:
    """Return the samples of example inputs with which the stages are compared."""
    elements = sum(leaf[0].numel() for leaf in tree_leaves(images))
    return tree_map(lambda leaf: leaf[:FEWER], images) if elements > LARGE else images


def rehearse(division: Division, owner: nn.Module, images: Any) -> str | None:
    """Return why the stages of a network, one after the other, do not compute what the network computes.

    Nothing of the network changes.

    Args:
        division: The division of the network, whose parameters must all have values.
        owner: The module in which forwards may store values.
        images: Example inputs of the network, of a few samples.

    Returns:
        The reason; None if the results are equal, or if the network itself cannot run with the example.
    """
    network, device = division.network, next(leaf.device for leaf in tree_leaves(images) if isinstance(leaf, Tensor))
    states = GeneratorStates.current(device)
    watch = StoredWatch(owner, network)
    noted = NotedParameters(dict(network.named_modules()))
    with torch.no_grad():
        try:
            arguments = images if len(network_inputs(network)) > 1 else (images,)
            with Untouched(network), noted.watching():
                watch.begin()
                expected = copy_value(type(network).forward(network, *copy_value(arguments)))
                stored = _copies(watch.take())
        except Exception:
            return None  # The example may be of another kind than the batches.
        finally:
            noted.restore()
            states.restore(device)
        try:
            with Untouched(network), noted.watching():
                actual, stored_by_stages = _in_stages(division, watch, images)
        except Exception as error:
            return f"{_HIDDEN}: the stages fail with {type(error).__name__}: {error}"
        finally:
            noted.restore()
            states.restore(device)
    if not _are_equal(expected, actual):
        return f"{_HIDDEN}: the stages return another result than the network"
    for key, values in stored_by_stages.items():
        if len(values) == 1 and not _are_equal(stored.get(key), values[0]):
            return f"{_HIDDEN}: the stages store another value in {key} than the network"
    return None


_HIDDEN = (
    "its modules pass values to each other through global variables, attributes or changes in place, and not only as "
    "arguments and results"
)


def refusal(network: nn.Module, reason: str) -> ConfigurationError:
    """Return the error for a network that :func:`rehearse` gives a reason for."""
    return ConfigurationError(
        f"{type(network).__name__} cannot be cut at these places, because {reason}; choose cuts that keep these "
        "modules in one stage, or return the values and pass them as arguments"
    )


def _in_stages(division: Division, watch: StoredWatch, images: Any) -> tuple[Any, dict[StoredKey, list[Any]]]:
    """Return the result of the stages, and for each key what the stages have stored."""
    values: dict[str, Any] = {IMAGES: images}
    stored: dict[StoredKey, list[Any]] = {}
    result: Any = None
    for stage, graph in enumerate(division.graphs()):
        watch.begin()
        # Each stage receives copies.
        result = division.run(stage, *(copy_value(values[name]) for name in graph.inputs))
        if graph.outputs:
            values |= zip(graph.outputs, copy_value(result), strict=True)
        for key, value in _copies(watch.take()).items():
            if key.kind in ("set", "values"):
                stored.setdefault(key, []).append(value)
    return result, stored


def _copies(stored: dict[StoredKey, Any]) -> dict[StoredKey, Any]:
    return {key: copy_value(value) for key, value in stored.items()}


def _are_equal(expected: Any, actual: Any) -> bool:
    leaves, others = tree_leaves(expected), tree_leaves(actual)
    return len(leaves) == len(others) and all(map(_is_equal, leaves, others))


def _is_equal(expected: Any, actual: Any) -> bool:
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return not is_number(expected) or not is_number(actual) or is_same(expected, actual)
    if expected.dtype != actual.dtype:
        return False
    return is_near(actual, expected, _TOLERANCES.get(expected.dtype, _TOLERANCE_OF_OTHERS))
