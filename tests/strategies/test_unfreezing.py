"""Parameters that are frozen and unfrozen during training: weights equal one device's weights, in float64."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm.optim
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from cnnstrategies.paramserver.specification import Specification, hyperparameters
from cnnstrategies.strategies import BalancedDDPStrategy, CompressedDDPStrategy, ParameterServerStrategy
from cnnstrategies.strategies.parameter_server.start import take_groups
from cnnstrategies.strategies.unfreezing import WrapsAgain, follow_unfreezing
from tests.conftest import quiet_trainer

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
        assert self.rank in (self.global_rank, 0.5)  # Servers' workers average buffers before each checkpoint.
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
    "parameter_server": lambda: ParameterServerStrategy(start_method="fork", replication=2, servers_per_node=2),
}


@pytest.mark.parametrize(
    ("name", "accumulated"), [("ddp", 1), ("ddp_balanced", 2), ("ddp_powersgd", 1), ("parameter_server", 2)]
)
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
def test_servers_train_parameters_that_are_unfrozen_later() -> None:
    weights = trained(ParameterServerStrategy(start_method="fork"), 2, 2, Held)
    torch.testing.assert_close(weights, trained(accumulated=2, kind=Held), rtol=1e-9, atol=1e-12)
    first = Held().net.state_dict()
    assert not any(torch.equal(weights[key], first[key]) for key in first), "each layer was trained for some steps"


@pytest.mark.parametrize("mode", ["async", "local"])
def test_servers_without_common_steps_receive_added_parameters(mode: Any) -> None:
    """A single worker trains the weights of one device in these modes as well."""
    weights = trained(ParameterServerStrategy(mode=mode, start_method="fork"), 1)
    torch.testing.assert_close(weights, trained(), rtol=1e-9, atol=1e-12)


class Clipping(Module):
    """A module with an optimizer that clips by the norm of all parameters, and that counts steps in its groups."""

    def configure_optimizers(self) -> Any:
        held = [p for name, p in self.named_parameters() if p.requires_grad or name.startswith("net.1")]
        return timm.optim.Lamb(held, 0.01, max_grad_norm=0.1)


def saved(folder: Path, strategy: Any = "auto", world: int = 1, resumed: Path | None = None) -> dict[str, Any]:
    """Return the checkpoint after the last epoch."""
    callbacks = [Finetuning(), ModelCheckpoint(folder, "{epoch}", save_top_k=-1)]
    trainer = quiet_trainer(
        strategy, world, max_epochs=3, callbacks=callbacks, enable_checkpointing=True, use_distributed_sampler=False
    )
    trainer.fit(Clipping(), ckpt_path=resumed)
    return torch.load(folder / "epoch=2.ckpt", weights_only=False)


def test_servers_hold_the_state_of_one_devices_optimizer_after_parameters_were_added(tmp_path: Path) -> None:
    for name, resumed in ("start", None), ("resumed", tmp_path / "start alone" / "epoch=1.ckpt"):
        expected = saved(tmp_path / f"{name} alone", resumed=resumed)
        checkpoint = saved(tmp_path / name, ParameterServerStrategy(start_method="fork"), 2, resumed)
        checkpoint["state_dict"]["rank"] = expected["state_dict"]["rank"]
        for key in "state_dict", "optimizer_states":
            torch.testing.assert_close(checkpoint[key], expected[key], rtol=1e-9, atol=1e-12)
        assert len(expected["optimizer_states"][0]["param_groups"]) == 2


def test_a_restarted_worker_takes_the_parameters_that_the_other_workers_have_added() -> None:
    module, other = Module(), Module()
    module.net[0].requires_grad_(False)
    other.net[0].requires_grad_(False)
    optimizer, changed = module.configure_optimizers(), other.configure_optimizers()
    changed.param_groups[0]["params"].append(other.net[0].bias)
    changed.add_param_group({"params": [other.net[0].weight], "lr": 0.05})
    specification = Specification.of(other.named_parameters(), changed, 2, number=1)
    del optimizer.param_groups[0]["params"][:2]
    take_groups(optimizer, module, specification)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    assert [names[id(p)] for group in optimizer.param_groups for p in group["params"]] == specification.held_names
    assert hyperparameters(optimizer) == hyperparameters(changed)
    assert module.net[0].weight.requires_grad


class Changed(Held):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        with torch.no_grad():
            self.net[1].weight *= 2
        super().on_train_batch_start(batch, index)


class Adding(Module):
    def training_step(self, batch: Any, index: int) -> Tensor:
        Finetuning.unfreeze_and_add_param_group(self.net[0], self.trainer.optimizers[0], lr=0.05)
        return super().training_step(batch, index)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Adding, "the optimizer had 6 parameters when the batch began, and has 8 now"),
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
    assert isinstance(strategy, WrapsAgain)


class Late(Module):
    def training_step(self, batch: Any, index: int) -> Tensor:
        self.net[1].requires_grad_(True)
        return super().training_step(batch, index)


def test_a_parameter_that_is_unfrozen_within_a_batch_is_refused() -> None:
    trainer = quiet_trainer(DDPStrategy(start_method="fork"), 1, max_epochs=1)
    follow_unfreezing(trainer)
    with pytest.raises(Exception, match=r"ConfigurationError: net\.1\.weight was unfrozen during a batch"):
        trainer.fit(Late())
