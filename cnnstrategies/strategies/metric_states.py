"""Metrics of ranks that are spawned: each has its own."""

from torch import nn
from torchmetrics import Metric


def own_metric_states(module: nn.Module) -> None:
    """Give this process its own copy of what the module's metrics have gathered.

    torch hands the tensors of a spawned process over in shared memory. Lightning's launcher copies parameters and
    buffers; the states of a metric are neither, and what one rank adds to them all others would find there.

    Args:
        module: Its metrics, and those of its submodules, get copies.
    """
    for metric in module.modules():
        for name, state in metric.metric_state.items() if isinstance(metric, Metric) else ():
            setattr(metric, name, [one.clone() for one in state] if isinstance(state, list) else state.clone())
