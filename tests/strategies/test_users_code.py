"""A module with habits of users' code trains the same weights, and logs the same values, under every strategy."""

from collections.abc import Callable
from typing import Any

import pytest
import timm.optim
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from cnnstrategies.strategies import BalancedDDPStrategy, HybridPipelineStrategy, ParameterServerStrategy
from tests.conftest import quiet_trainer

SAMPLES, GLOBAL_BATCH = 64, 8


class Module(LightningModule):
    """A module that keeps gradients over two batches, clips them by their norm, and logs a mean over the epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.example_input_array = torch.zeros(1, 3, 6, 6, dtype=torch.float64)
        layers = [nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Flatten()]
        self.net = nn.Sequential(*layers, nn.Linear(64, 5)).double()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def optimizer_zero_grad(self, epoch: int, index: int, optimizer: torch.optim.Optimizer) -> None:
        if index % 2:
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return timm.optim.Lamb(self.net.parameters(), 0.01, max_grad_norm=0.1)


def trained(strategy: Any, world: int, accumulated: int) -> dict[str, Tensor]:
    """Return the weights after two epochs, and the loss of the last epoch."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 3, 6, 6, generator=generator, dtype=torch.float64)
    data = TensorDataset(images, torch.randint(5, (SAMPLES,), generator=generator))
    divides = world > 1 and not isinstance(strategy, HybridPipelineStrategy)
    sampler = None if divides else DistributedSampler(data, 1, 0, seed=0)  # Lightning shuffles like this.
    module = Module()
    trainer = quiet_trainer(strategy, world, max_epochs=2, accumulate_grad_batches=accumulated)
    trainer.fit(module, DataLoader(data, GLOBAL_BATCH // (2 if divides else 1), sampler=sampler))
    return {**module.net.state_dict(), "loss": trainer.callback_metrics["loss_epoch"]}


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": lambda: DDPStrategy(start_method="fork"),
    "ddp_balanced": lambda: BalancedDDPStrategy(start_method="fork", shares="equal"),
    "hybrid_pipeline": lambda: HybridPipelineStrategy(start_method="fork", replicas=[1, 1]),
    "parameter_server": lambda: ParameterServerStrategy(start_method="fork", servers_per_node=2),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_kept_and_accumulated_gradients_and_norms_of_all_parameters_equal_one_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step of an epoch has fewer batches than the other steps."""
    if name == "parameter_server":  # Torch's collectives need all workers, and would end the run if one is lost.
        monkeypatch.delattr(torch.distributed, "all_reduce")
    values = trained(STRATEGIES[name](), 2, accumulated=3)
    torch.testing.assert_close(values, trained("auto", 1, accumulated=3), rtol=1e-9, atol=1e-12)
