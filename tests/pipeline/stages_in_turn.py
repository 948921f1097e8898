"""Train the stages of a divided network in one process, one stage after the other."""

from typing import Any

from torch import Tensor

from cnnstrategies.pipeline.division import Division


def train_in_stages(division: Division, images: Tensor) -> Tensor:
    """Run all stages forward and backward, with the sum of the squared outputs as loss, and return the outputs.

    As in a pipeline, a stage receives values that are leaves of its own autograd graph.
    """
    graphs = division.graphs()
    values: dict[str, Any] = {"images": images}
    leaves: list[dict[str, Any]] = []
    for stage, graph in enumerate(graphs):
        leaves.append({name: as_leaf(values[name], stage > 0) for name in graph.inputs})
        outputs = division.run(stage, *leaves[stage].values())
        values |= zip(graph.outputs, outputs, strict=True) if graph.outputs else {"result": outputs}
    values["result"].square().sum().backward()
    for stage in reversed(range(division.stages - 1)):
        for name in graphs[stage].outputs:
            value = values[name]
            if isinstance(value, Tensor) and value.requires_grad:
                gradients = [later[name].grad for later in leaves[stage + 1 :] if name in later]
                value.backward(sum(gradients), retain_graph=True)
    result: Tensor = values["result"]
    return result


def as_leaf(value: Any, requires_grad: bool) -> Any:
    """Return a value that a stage receives: a leaf, or what is not a tensor as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(requires_grad and value.is_floating_point())
