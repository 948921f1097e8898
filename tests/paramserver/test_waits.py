"""Every wait ends: with what was waited for, or by its deadline with an error that names who did not answer what."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from roles import PlainRoles

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies import ParameterServerStrategy


def test_the_timeout_reaches_the_servers() -> None:
    module = LightningModule()
    module.weight = torch.nn.Parameter(torch.zeros(3))
    options = ParameterServerStrategy(timeout=7.0).options
    assert options.specification(module, torch.optim.SGD([module.weight], lr=0.1), 1, 2).timeout == 7


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), 1e300])
def test_a_learning_rate_that_servers_refuse_is_an_error_at_its_worker_at_once(rate: float, tmp_path: Path) -> None:
    with PlainRoles(tmp_path) as run:
        worker, _ = run.joined()
        run.step(worker)
        run.optimizer.param_groups[0]["lr"] = rate
        with pytest.raises(ConfigurationError, match=r"step 1: lr=.* of parameter group 0"):
            run.step(worker)
        run.optimizer.param_groups[0]["lr"] = 0.1
        run.step(worker)
