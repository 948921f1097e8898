"""Objects that cannot be passed to spawned ranks are named, with a remedy, before any rank starts."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies import CompressedDDPStrategy, ParameterServerStrategy
from tests.conftest import quiet_trainer


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 2)
        self.optimizer = lambda parameters: torch.optim.SGD(parameters, 0.1)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.net(batch).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


@pytest.mark.parametrize("kind", [CompressedDDPStrategy, ParameterServerStrategy])
def test_a_lambda_in_a_spawned_run_is_refused_with_a_remedy(kind: Any) -> None:
    trainer = quiet_trainer(kind(start_method="spawn"), 2, max_epochs=1)
    with pytest.raises(ConfigurationError, match=r"cannot be passed .*lambda.* ends in _fork"):
        trainer.fit(Module(), [torch.zeros(2, 2)])
