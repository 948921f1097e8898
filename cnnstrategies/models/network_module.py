"""Base class of this package's LightningModules: a network with its optimizer, scheduler and metrics."""

import inspect
import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from cnnstrategies._lightning_private import built_by_cli
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.logits import main_logits
from cnnstrategies.pretrained import trained_with
from cnnstrategies.runtime.compiling import compile_parts
from cnnstrategies.runtime.seeds import mixed_seed
from cnnstrategies.strategies.protocol import facts_of

Batch = tuple[Tensor, Tensor]
ON_BAR = ("train_loss", "val_acc", "test_acc", "val_miou", "test_miou", "val_map", "val_mae")


class MeanOverSamples(Metric):
    """Metric: mean over the samples of all batches, computed from the mean of each batch.

    Torchmetrics' ``MeanMetric`` is not used, because it makes the CPU wait for the device three times in each step.
    """

    total: Tensor
    samples: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "samples"):
            self.add_state(name, torch.zeros(()), dist_reduce_fx="sum")

    def update(self, mean: Tensor, samples: int) -> None:
        """Add a batch with its mean and its number of samples."""
        self.total += mean.to(self.total.dtype) * samples
        self.samples += samples

    def compute(self) -> Tensor:
        """Return the mean over all samples so far. The result is NaN if the mean of a batch was NaN."""
        return self.total / self.samples


class NetworkModule(LightningModule):
    """Base class of LightningModules that train one network on batches ``(images, targets)``.

    The arguments are documented in the subclasses.
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        optimizer: OptimizerCallable | None,
        lr_scheduler: LRSchedulerCallable | None,
        lr_interval: Literal["epoch", "step"],
        decay_norms_and_biases: bool,
        channels_last: bool,
        compile_backend: str | None,
        least: int = 2,
        layer_lr_decay: float = 1.0,
    ) -> None:
        super().__init__()
        if num_classes < least:
            raise ConfigurationError(f"num_classes={num_classes}: use at least {least}")
        check_layer_lr_decay(network, layer_lr_decay)
        # The frame is that of the subclass, whose arguments are saved. The network and the two functions are not saved
        # as hyperparameters, because a checkpoint with such objects cannot be loaded with weights_only=True. In a run
        # of the command line, their configuration is saved instead.
        functions = None if built_by_cli() else ["network", "optimizer", "lr_scheduler"]
        frame = inspect.currentframe()
        self.save_hyperparameters(ignore=functions, frame=frame and frame.f_back)
        self.network = network.to(memory_format=torch.channels_last) if channels_last else network
        self.num_classes = num_classes
        # AdamW is not the default value in the signature, because jsonargparse would pass AdamW's weight decay to any
        # other optimizer that a user chooses.
        self.optimizer_factory = torch.optim.AdamW if optimizer is None else optimizer
        self.lr_scheduler_factory = lr_scheduler
        self.lr_interval = lr_interval
        self.decay_norms_and_biases = decay_norms_and_biases
        self.layer_lr_decay = layer_lr_decay
        self.channels_last = channels_last
        self.compile_backend = compile_backend

    quality: str = "acc"  # Name of the metric by which networks are compared, without `val_` or `test_`.

    def check_data(self, datamodule: LightningDataModule | None) -> None:
        """Check that the data module has the model's number of classes and the preprocessing that the network expects.

        If the network's pretrained weights expect a different mean or standard deviation, the method only warns.

        Raises:
            ConfigurationError: The numbers of classes of the data module and of the model differ.
        """
        classes = getattr(datamodule, "num_classes", self.num_classes)
        if classes != self.num_classes:
            raise ConfigurationError(
                f"the model has num_classes={self.num_classes}, but {type(datamodule).__name__} has "
                f"num_classes={classes}: set model.init_args.num_classes={classes}"
            )
        prepared, trained = getattr(datamodule, "preprocessing", None), trained_with(self.network)
        if (
            prepared is not None
            and trained is not None
            and (prepared.mean, prepared.std) != (trained.mean, trained.std)
        ):
            rank_zero_warn(
                f"the network's pretrained weights expect the preprocessing {trained}, but "
                f"{type(datamodule).__name__} has the preprocessing {prepared}: call the data module's "
                "prepare_as(cnnstrategies.pretrained.trained_with(network))"
            )

    def setup(self, stage: str) -> None:
        """Check that the data fit the model, reset the metrics and compile the network.

        The metrics are reset for two reasons. After ``validate`` their tensors are inference tensors, which cannot be
        updated outside inference mode. Without a reset, spawned ranks would also share these tensors in shared memory.
        """
        self.check_data(getattr(self.trainer, "datamodule", None))
        for module in self.modules():
            if isinstance(module, Metric):
                module.reset()
        if self.compile_backend is not None:
            compile_parts(self.trainer, [self.network], self.compile_backend)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Seed torch's random number generators for a training step from the run's seed, the step and the batch.

        Dropout and mixup use these generators. A resumed run therefore draws the same random numbers as an
        uninterrupted run, although checkpoints do not contain the states of the generators. Ranks that run a step
        together with the same batch get the same seed.
        """
        seed = os.environ.get("PL_GLOBAL_SEED")
        if self.trainer.training and seed is not None:
            step = self.trainer.fit_loop.epoch_loop.total_batch_idx + 1
            facts = facts_of(self.trainer.strategy)
            replica = 0 if facts.has_global_batches else self.global_rank // facts.ranks_per_batch
            _seed_draws(mixed_seed(int(seed), step, replica), self.trainer.strategy.root_device)
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Convert the images to the memory format ``channels_last`` if it is set, on the device."""
        images, targets = batch
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images, targets

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch. Subclasses implement this method.

        Args:
            outputs: The network's outputs.
            targets: The batch's targets.
        """
        raise NotImplementedError

    def log_step(self, stage: Literal["train", "val", "test"], outputs: Any, targets: Tensor, loss: Tensor) -> None:
        """Add a batch to the metrics of training, validation or test, and log them.

        Training metrics are passed to Lightning's ``log`` only with the epoch's first batch. This saves time in the
        other steps, and is enough, because Lightning computes these metrics only at the end of the epoch.

        Args:
            stage: Prefix of the metrics' names.
            outputs: The network's outputs.
            targets: The batch's targets.
            loss: Mean loss of the batch.
        """
        values = self.compared(main_logits(outputs).detach(), targets), loss.detach()
        if self._trainer is not None:  # A user's own loop may call the steps without a trainer.
            values = facts_of(self._trainer.strategy).on_all_ranks(values)
        compared, loss = values
        metrics = getattr(self, f"{stage}_metrics")
        known = stage == "train" and metrics["loss"].update_called
        for name, metric in metrics.items():
            if name == "loss":
                metric.update(loss, len(targets))
            else:
                metric.update(*compared)
            if not known:
                self.log(f"{stage}_{name}", metric, on_step=False, on_epoch=True, prog_bar=f"{stage}_{name}" in ON_BAR)
        if stage == "train":
            self.log("train_loss_step", loss, on_step=True, on_epoch=False)

    def compared(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and targets in the form that the metrics expect."""
        return logits, targets

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a training batch."""
        images, targets = batch
        outputs = self.network(images)
        loss = self.loss(outputs, targets)
        self.log_step("train", outputs, targets, loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Add a validation batch to the metrics. Return ``logits`` and ``targets``, which callbacks may read."""
        return self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Add a test batch to the metrics. Return ``logits`` and ``targets``, which callbacks may read."""
        return self._evaluate("test", batch)

    def evaluated(self, images: Tensor) -> Any:
        """Return the network's outputs for images in validation, test and predict."""
        return self.network(images)

    def _evaluate(self, stage: Literal["val", "test"], batch: Batch) -> dict[str, Tensor]:
        images, targets = batch
        outputs = self.evaluated(images)
        self.log_step(stage, outputs, targets, self.loss(outputs, targets))
        return {"logits": main_logits(outputs), "targets": targets}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build the optimizer for the trainable parameters, and the scheduler."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.layer_lr_decay < 1:
            options = (self.decay_norms_and_biases, self.layer_lr_decay)
            layers, factors = layer_groups(self.network, trained, *options)
            optimizer = self.optimizer_factory(layers)
            for group, factor in zip(optimizer.param_groups, factors, strict=True):
                group["lr"] = group["lr"] * factor
            return self._scheduled(optimizer)
        undecayed = [] if self.decay_norms_and_biases else [parameter for parameter in trained if parameter.ndim < 2]
        if undecayed:
            decayed = [parameter for parameter in trained if parameter.ndim > 1]
            groups: list[dict[str, Any]] = [{"params": decayed}, {"params": undecayed, "weight_decay": 0.0}]
            optimizer = self.optimizer_factory(groups if decayed else groups[1:])
        else:
            # A user's function that builds the optimizer may not accept parameter groups, so it gets a list of
            # parameters.
            optimizer = self.optimizer_factory(trained)
        return self._scheduled(optimizer)

    def _scheduled(self, optimizer: Optimizer) -> OptimizerLRScheduler:
        if self.lr_scheduler_factory is None:
            return optimizer
        scheduler = self.lr_scheduler_factory(optimizer)
        check_schedule(optimizer, scheduler, self.layer_lr_decay)
        if isinstance(scheduler, ReduceLROnPlateau):
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "epoch", "monitor": scheduler.monitor},
            }
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": self.lr_interval},
        }


def _seed_draws(seed: int, device: torch.device) -> None:
    """Seed torch's random generators of the CPU and of one device.

    ``torch.manual_seed`` is slower: it tries every kind of accelerator, and formats a traceback for each kind that is
    not available.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def check_layer_lr_decay(network: nn.Module, layer_lr_decay: float) -> None:
    """Refuse a decay outside of (0, 1], and a network whose layers timm cannot find.

    Raises:
        ConfigurationError: The learning rates cannot fall from layer to layer.
    """
    if not 0 < layer_lr_decay <= 1:
        raise ConfigurationError(f"layer_lr_decay={layer_lr_decay} is outside (0, 1]; 0.65 to 0.9 is usual")
    if layer_lr_decay == 1:
        return
    if find_spec("timm") is None:
        raise ConfigurationError(
            f"layer_lr_decay={layer_lr_decay} needs timm, which is not installed: pip install timm"
        )
    if not hasattr(network, "group_matcher"):
        raise ConfigurationError(
            f"layer_lr_decay={layer_lr_decay}: timm does not know the layers of {type(network).__name__}: use a "
            "network of timm.create_model, define the method group_matcher in the network's class, or leave "
            "layer_lr_decay out"
        )


def layer_groups(
    network: nn.Module, trained: Sequence[nn.Parameter], decay_norms_and_biases: bool, layer_lr_decay: float
) -> tuple[list[dict[str, Any]], list[float]]:
    """Return parameter groups for an optimizer, and the factor of each group's learning rate.

    Args:
        network: The network, with timm's method ``group_matcher``.
        trained: Parameters to train. Parameters outside of the network count as part of the last layer.
        decay_norms_and_biases: Whether weight decay is also applied to parameters with one dimension, and to parameters
            in the network's ``no_weight_decay``.
        layer_lr_decay: Factor between the learning rates of a layer and of the next layer.

    Raises:
        ConfigurationError: All trained parameters are in one layer.
    """
    from timm.optim import param_groups_layer_decay  # type: ignore[attr-defined]  # no re-export in timm's types

    undecayed: set[str] = getattr(network, "no_weight_decay", set)()
    # A group without weight decay gets the entry 0. Other groups get the optimizer's own weight decay.
    groups = param_groups_layer_decay(
        network,
        weight_decay=1.0,
        no_weight_decay_list=() if decay_norms_and_biases else undecayed,
        weight_decay_exclude_1d=not decay_norms_and_biases,
        layer_decay=layer_lr_decay,
    )
    factors = [group.pop("lr_scale") for group in groups]
    if len(set(factors)) < 2:
        raise ConfigurationError(
            f"layer_lr_decay={layer_lr_decay} has no effect, because all trained parameters of "
            f"{type(network).__name__} are in one layer: leave layer_lr_decay out"
        )
    for group in groups:
        if group["weight_decay"]:
            del group["weight_decay"]
    known = {id(parameter) for group in groups for parameter in group["params"]}
    if others := [parameter for parameter in trained if id(parameter) not in known]:
        groups.append({"params": others})
        factors.append(1.0)
    return groups, factors


def check_schedule(optimizer: Optimizer, scheduler: Any, layer_lr_decay: float) -> None:
    """Refuse a scheduler that has replaced the learning rates of all layers by one rate.

    Raises:
        ConfigurationError: All layers have the same learning rate.
    """
    if layer_lr_decay < 1 and len({float(group["lr"]) for group in optimizer.param_groups}) == 1:
        raise ConfigurationError(
            f"layer_lr_decay={layer_lr_decay}: {type(scheduler).__name__} sets the same learning rate for all layers: "
            "use another scheduler, such as cnnstrategies.schedules.WarmupCosine"
        )
