"""Checkpoints of pruned networks are plain checkpoints, resuming is exact, and every rank prunes the same weights."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.callbacks import Pruning
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.networks import SmallCNN
from cnnstrategies.strategies import ParameterServerStrategy
from tests.conftest import quiet_trainer


def classifier(network=None):
    seed_everything(1, verbose=False)
    network = SmallCNN(10, widths=[8]) if network is None else network
    return ImageClassifier(network, 10, optimizer=lambda params: torch.optim.SGD(params, 0.05, momentum=0.9))


def fit(*callbacks, model=None, ckpt_path=None, **options):
    trainer = quiet_trainer(callbacks=list(callbacks), **{"limit_train_batches": 6, "max_epochs": 4, **options})
    model = classifier() if model is None else model
    trainer.fit(model, DigitsDataModule(batch_size=32), ckpt_path=ckpt_path)
    return model


def weights(state_dict):
    names = ["block1.0.0.weight", "block1.2.0.weight", "classifier.weight"]
    return torch.cat([state_dict[f"network.{name}"].flatten() for name in names])


def test_pruned_checkpoints_are_plain_and_resume_exactly():
    names = set(classifier().state_dict())
    saved = ModelCheckpoint("pruned", filename="{epoch}", save_top_k=-1)
    whole = fit(Pruning(0.8, epoch=1), saved, enable_checkpointing=True)
    zeros = int((weights(whole.state_dict()) == 0).sum())
    total = weights(whole.state_dict()).numel()
    assert zeros == round(0.8 * total)
    assert set(whole.state_dict()) == names
    # Biases are not pruned.
    assert all((value != 0).all() for name, value in whole.state_dict().items() if name.endswith(".bias"))
    # Checkpoints from pruning on also have the network's own parameter names, and contain tensors only.
    for epoch in (2, 3):
        checkpoint = torch.load(f"pruned/epoch={epoch}.ckpt", weights_only=True)
        assert set(checkpoint["state_dict"]) == names
        assert int((weights(checkpoint["state_dict"]) == 0).sum()) == zeros
    assert (weights(torch.load("pruned/epoch=0.ckpt", weights_only=True)["state_dict"]) != 0).all()
    for epoch in (0, 1, 2):
        resumed = fit(Pruning(0.8, epoch=1), ckpt_path=f"pruned/epoch={epoch}.ckpt")
        for name, value in whole.state_dict().items():
            assert torch.equal(resumed.state_dict()[name], value), (epoch, name)


class SameZeros(Callback):
    """Write to a file whether the ranks have equal weights before pruning, and equal zeros after it."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx != 4:
            return
        pruned = trainer.current_epoch == 1
        values = torch.cat([m.weight.flatten() for m in pl_module.modules() if isinstance(m, nn.Conv2d | nn.Linear)])
        first, second = trainer.strategy.all_gather(values.detach() == 0 if pruned else values.detach())
        if trainer.is_global_zero:
            with open("ranks.txt", "a") as file:
                file.write(f"{trainer.current_epoch} {torch.equal(first, second)} {int((values == 0).sum())}\n")


def test_every_rank_prunes_what_rank_0_chose():
    """In mode local the ranks' weights differ, so each rank would choose different weights to prune."""
    strategy = ParameterServerStrategy(mode="local", sync_every=1000, start_method="fork")
    options = {"max_epochs": 2, "limit_val_batches": 0}
    fit(Pruning(0.8, epoch=0), SameZeros(), strategy=strategy, devices=2, **options)
    with open("ranks.txt") as file:
        assert file.read().splitlines() == ["0 False 0", "1 True 582"]


REFUSED = {
    "amount=1.0 .*such as 0.5": lambda: Pruning(1.0),
    "epoch=-1 .*0 prunes": lambda: Pruning(epoch=-1),
    "epoch=3.* no epoch .*trainer.max_epochs=4: raise": lambda: fit(Pruning(epoch=3)),
    "EMAWeightAveraging cannot .*remove one": lambda: fit(Pruning(), EMAWeightAveraging()),
    "no convolution or linear layer": lambda: fit(Pruning(), model=classifier(nn.Flatten())),
    # FSDP itself needs a GPU; the refusal does not.
    "FSDPStrategy.*trainer.strategy=ddp": lambda: Pruning().setup(
        SimpleNamespace(strategy=FSDPStrategy()), classifier(), "fit"
    ),
}


def test_refusals_name_the_value_and_the_remedy():
    fit(Pruning(), fast_dev_run=True)
    for words, make in REFUSED.items():
        with pytest.raises(ConfigurationError, match=words):
            make()
