"""Mistakes in the options are reported before a process starts."""

from typing import Any

import pytest
import torch
from torch import nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.optimizers import load_optimizer
from cnnstrategies.paramserver.specification import Specification
from tests.paramserver.training import ADAMW, specify

pytestmark = pytest.mark.light


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, r"mode='fast': use one of sync, async, ssp, local"),
        ({"servers": 0}, r"servers=0: use at least 1"),
        ({"replication": 3, "servers": 2}, r"replication=3 needs at least 3 servers, but servers=2"),
        ({"staleness": 2}, r"staleness=2 has no effect with mode='sync'"),
        ({"pipelined": True, "clip_norm": 1.0}, r"pipelined=True works only with mode='sync' and without clip_norm"),
        ({"pipelined": True, "mode": "local"}, r"pipelined=True works only with mode='sync'"),
        ({"pipelined": True, "pull_compression": "auto"}, r"pipelined=True does not work with pull_compression='auto'"),
        ({"compression": "zip"}, r"compression='zip': use one of none, fp16"),
        ({"topk_density": 0.0}, r"topk_density=0.0: use a number above 0"),
        ({"mode": "local", "clip_norm": 1.0}, r"clip_norm and clip_value do not work with mode='local'"),
        ({"pull_compression": "top"}, r"pull_compression='top': use one of none, fp16, bf16, topk, onebit"),
        (
            {"pull_compression": "topk", "mode": "async"},
            r"pull_compression='topk' does not work with mode='async', .* use mode='sync'",
        ),
        ({"clip_norm": 1.0, "clip_value": 1.0}, r"set only one of them"),
        ({"clip_norm": -1.0}, r"clip_norm=-1.0: use a positive number"),
    ],
)
def test_invalid_options_are_refused_with_the_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        specify(ADAMW, 2, **options)


def test_optimizers_that_cannot_run_on_servers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs a closure or sparse gradients"):
        load_optimizer("torch.optim.lbfgs.LBFGS")
    with pytest.raises(ConfigurationError, match="cannot import this class"):
        load_optimizer("nowhere.Optimizer")
    with pytest.raises(ConfigurationError, match=r"not a subclass of torch.optim.Optimizer"):
        load_optimizer("collections.OrderedDict")
    named, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigurationError, match=r"shape \(3,\)"):
        Specification.of([("w", named)], torch.optim.SGD([named, other], lr=0.1), 1)
