"""Parameters that are frozen and unfrozen during training: weights equal one device's weights, in float64."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import quiet_trainer
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from cnnstrategies.strategies import BalancedDDPStrategy, CompressedDDPStrategy, ParameterServerStrategy
from cnnstrategies.strategies.unfreezing import follow_unfreezing

SAMPLES, GLOBAL_BATCH = 32, 8


class Module(LightningModule):
    """A module that unfreezes one layer within an epoch, and freezes another layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = [nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 5, 4)]
        self.net = nn.Sequential(*layers).double()
        self.net[1].requires_grad_(False)
        # Each process has a value of its own, which must survive that the module is wrapped again.
        self.register_buffer("rank", torch.zeros(()))

    def on_train_start(self) -> None:
        self.rank.fill_(self.global_rank)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self.trainer.current_epoch == 1 and index == 1:
            self.net[1].requires_grad_(True)
            self.net[2].requires_grad_(False)

    def training_step(self, batch: Any, index: int) -> Tensor:
        assert self.rank == self.global_rank
        return F.cross_entropy(self.net(batch[0]).tanh().flatten(1), batch[1])

    def train_dataloader(self) -> DataLoader[Any]:
        """Return this rank's part of each global batch."""
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(SAMPLES, 3, 6, 6, generator=generator, dtype=torch.float64)
        data = TensorDataset(images, torch.randint(5, (SAMPLES,), generator=generator))
        sampler = DistributedSampler(data, self.trainer.world_size, self.trainer.global_rank, shuffle=False)
        return DataLoader(data, GLOBAL_BATCH // self.trainer.world_size, sampler=sampler)

    def configure_optimizers(self) -> Any:
        # `net[1]` is held by the optimizer although it is frozen. The callback adds `net[0]` later.
        held = [p for name, p in self.named_parameters() if p.requires_grad or name.startswith("net.1")]
        return torch.optim.SGD(held, 0.1, momentum=0.9)


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.net[0])  # type: ignore[index]

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.05)  # type: ignore[index]


def trained(
    strategy: Any = "auto", world: int = 1, accumulated: int = 1, kind: Callable[[], Module] = Module
) -> dict[str, Tensor]:
    trainer = quiet_trainer(
        strategy, world, max_epochs=3, callbacks=[Finetuning()], accumulate_grad_batches=accumulated,
        use_distributed_sampler=False,
    )  # fmt: skip
    follow_unfreezing(trainer)  # The command line calls this for every strategy.
    module = kind()
    trainer.fit(module)
    return dict(module.net.state_dict())


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": lambda: DDPStrategy(start_method="fork", broadcast_buffers=False),
    "ddp_balanced": lambda: BalancedDDPStrategy(start_method="fork", shares="equal", broadcast_buffers=False),
    "ddp_powersgd": lambda: CompressedDDPStrategy("powersgd", start_method="fork", broadcast_buffers=False),
}


@pytest.mark.parametrize(("name", "accumulated"), [("ddp", 1), ("ddp_balanced", 2), ("ddp_powersgd", 1)])
def test_parameters_that_are_unfrozen_later_are_trained_as_on_one_device(name: str, accumulated: int) -> None:
    first = Module().net.state_dict()
    weights = trained(STRATEGIES[name](), 2, accumulated)
    torch.testing.assert_close(weights, trained(accumulated=accumulated), rtol=1e-9, atol=1e-12)
    assert not any(torch.equal(weights[key], first[key]) for key in first), "each layer was trained for some steps"


class Held(Module):
    """A module whose optimizer holds all parameters from the start, because servers hold only these."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_servers_train_parameters_that_are_unfrozen_later(accumulated: int) -> None:
    weights = trained(ParameterServerStrategy(start_method="fork"), 2, accumulated, Held)
    torch.testing.assert_close(weights, trained(accumulated=accumulated, kind=Held), rtol=1e-9, atol=1e-12)
    first = Held().net.state_dict()
    assert not any(torch.equal(weights[key], first[key]) for key in first), "each layer was trained for some steps"


class Changed(Held):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        with torch.no_grad():
            self.net[1].weight *= 2
        super().on_train_batch_start(batch, index)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Module, "the optimizer has 8 parameters, but had 6 parameters when training began"),
        (Changed, "net.1.weight was changed while it was frozen"),
    ],
)
def test_servers_refuse_parameters_whose_values_they_do_not_hold(kind: type[Module], message: str) -> None:
    with pytest.raises(Exception, match=f"ConfigurationError: {message}"):
        trained(ParameterServerStrategy(start_method="fork"), 1, kind=kind)


def test_a_spawned_rank_follows_unfreezing() -> None:
    """Spawned ranks get the strategy as a pickle."""
    trainer = quiet_trainer("ddp_spawn", 2)
    follow_unfreezing(trainer)
    strategy = pickle.loads(pickle.dumps(trainer.strategy))
    assert strategy.on_train_batch_start.args == (strategy,)


class Late(Module):
    def training_step(self, batch: Any, index: int) -> Tensor:
        self.net[1].requires_grad_(True)
        return super().training_step(batch, index)


def test_a_parameter_that_is_unfrozen_within_a_batch_is_refused() -> None:
    trainer = quiet_trainer(DDPStrategy(start_method="fork"), 1, max_epochs=1)
    follow_unfreezing(trainer)
    with pytest.raises(Exception, match=r"ConfigurationError: net\.1\.weight was unfrozen during a batch"):
        trainer.fit(Late())
