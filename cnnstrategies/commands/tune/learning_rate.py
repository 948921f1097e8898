"""Search for a learning rate with Lightning's learning-rate finder, on one device."""

from pathlib import Path

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.tuner.tuning import Tuner
from matplotlib.figure import Figure

from cnnstrategies.commands.arguments.refuse import in_one_line
from cnnstrategies.commands.run.lightning_cli import ModelAndData
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.samples import samples_of
from cnnstrategies.runtime.processes import temporary_folder

# Settings of the configuration's trainer that change which learning rates are good.
KEPT = ("accelerator", "precision", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
RISE = 0.5  # Rise of the loss, as a fraction of its whole fall, after which the rates are too large.
SKIPPED = 10  # Number of steps whose smoothed losses are not reliable yet, as in Lightning.


def find_learning_rate(cli: ModelAndData, picture: Path) -> None:
    """Train for up to 100 steps with a rising learning rate, and print the rate at which the loss falls fastest.

    Args:
        cli: Command line with the module and the data module.
        picture: PNG file for the curve of the loss over the learning rate.

    Raises:
        ConfigurationError: The module has several optimizers, or the training is too short for a suggestion.
    """
    options = {name: cli.config.trainer[name] for name in KEPT}
    with temporary_folder("cnnstrategies_tune_") as folder:
        trainer = Trainer(
            devices=1,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=folder,
            **options,
        )
        try:
            finder = Tuner(trainer).lr_find(cli.model, datamodule=cli.datamodule, update_attr=False)
        except MisconfigurationException as error:
            raise ConfigurationError(in_one_line(str(error))) from error
    assert finder is not None, "the finder runs unless fast_dev_run is set"
    rates, losses = (np.array(finder.results[name]) for name in ("lr", "loss"))
    best = steepest(rates, losses)
    figure = Figure()
    axes = figure.subplots()
    finder.plot(ax=axes)
    axes.plot(rates[best], losses[best], "o", color="red")
    figure.savefig(picture)
    samples = samples_of(trainer.train_dataloader, cli.datamodule)
    batches = "" if samples is None else f" with batches of {samples} samples"
    print(f"Suggested learning rate: {rates[best]:.2g}, found on one device{batches}. Curve: {picture}")


def steepest(rates: np.ndarray, losses: np.ndarray) -> int:
    """Return the position at which the loss falls fastest with the logarithm of the learning rate.

    Positions after the smallest loss do not count, nor after a first rise by more than half of the whole fall: there
    the rates are too large for a training.

    Lightning's own suggestion divides by differences of the rates themselves. It then chooses one of the smallest
    rates, at which the noise of the loss looks steep: 8e-6 for the quickstart, whose loss falls from 0.01 on.

    Args:
        rates: Learning rates in ascending order.
        losses: Smoothed loss at each learning rate.

    Raises:
        ConfigurationError: There are too few losses, or the loss never falls.
    """
    usable = np.isfinite(losses)
    usable[:SKIPPED], usable[-1:] = False, False
    positions = np.flatnonzero(usable)
    positions = positions[: small_enough(losses[positions])]
    slopes = np.gradient(losses[positions], np.log(rates[positions])) if len(positions) > 1 else np.zeros(1)
    if slopes.min() >= 0:
        raise ConfigurationError(
            f"tune: the loss does not fall in {len(losses)} steps with learning rates from {rates[0]:.1g} to "
            f"{rates[-1]:.1g}, so there is no suggestion: check the data and the loss"
        )
    return int(positions[slopes.argmin()])


def small_enough(losses: np.ndarray) -> int:
    """Return the number of learning rates before the smallest loss, or before the first large rise of the loss.

    The first third has rates that are too small for a change. Its median stands for the loss before the training,
    because Lightning smooths the first losses with zeros.

    Args:
        losses: Smoothed losses, for rising learning rates.
    """
    first, rest = np.array_split(losses, [len(losses) // 3])
    if not len(first):
        return 0
    lowest = np.minimum.accumulate([np.median(first), *rest])[1:]
    risen = np.flatnonzero(rest - lowest > RISE * (np.median(first) - lowest[-1]))
    falling = rest[: risen[0]] if len(risen) else rest
    return len(first) + (int(falling.argmin()) + 1 if len(falling) else 0)
