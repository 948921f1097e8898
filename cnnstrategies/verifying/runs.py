"""``verify``: train a module under a strategy and on one device with the same batches, and compare the two runs."""

import inspect
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from cnnstrategies._lightning_private import forks_on_cpu, ranks_are_children
from cnnstrategies.cluster.rendezvous import ranks_meet
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.verifying.batches import PRECISIONS, Precision, keeper_of
from cnnstrategies.verifying.comparison import verdict_of
from cnnstrategies.verifying.recorder import Recorder, RunRole
from cnnstrategies.verifying.verdict import Verdict

# Arguments of `Trainer` that turn off the validation before training, the progress bar and the model summary.
QUIET: dict[str, Any] = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
MANY_EPOCHS = 1000  # Lightning's default for `max_epochs`.
FORKS = (
    "verify needs a strategy that can fork its processes, and this strategy cannot; use ddp, hybrid_pipeline or "
    "parameter_server"
)
FORK_OPTION = (
    "verify needs a strategy that forks its processes; give the strategy start_method=fork, on the command line with "
    "--trainer.strategy.start_method fork"
)


def verify(
    module: LightningModule,
    data: Any,
    strategy: str | Strategy = "ddp",
    *,
    devices: int = 2,
    steps: int = 8,
    precision: Precision = "64-true",
    callbacks: Sequence[Callback] = (),
    plugins: Sequence[Any] = (),
    **trainer: Any,
) -> Verdict:
    """Train a module for some steps under a strategy and on one device, with the same batches, and compare the results.

    Both runs start from the module's current weights, and use the module's own hooks, optimizers and schedules. They
    train in float64 unless another precision is given, or in float32 if the module cannot be trained in float64. In a
    lower precision than float64, the run on one device is repeated with errors of rounding, and differences that are
    more than ten times as large as those of these runs count. Dropout is turned off, also ``F.dropout``, and
    batch normalisation uses its running statistics, except under a strategy whose layers draw and measure what they do
    on one device. The run on one device trains on global batches, which are joined from the batches that the ranks have
    loaded.

    Both runs are forked from this process. Call this function before this process trains a network or uses a GPU.

    Args:
        module: The module, as you would pass it to ``Trainer.fit``. It is not changed.
        data: The data module, or the training loader.
        strategy: The registered name of a strategy, or a strategy object that forks its processes.
        devices: Number of the strategy's processes.
        steps: Number of optimizer steps.
        precision: Precision of the runs, as Lightning names it: "64-true", "32-true", "bf16-mixed" or "16-mixed".
        callbacks: The user's callbacks. Callbacks that save checkpoints are left out.
        plugins: Plugins of the trainer. A precision plugin is not allowed, because ``verify`` uses its own.
        **trainer: Other arguments of ``Trainer`` for both runs, such as ``gradient_clip_val``.

    Returns:
        The result of the comparison: a row for each kind of value, with the differences.

    Raises:
        ConfigurationError: The precision is unknown, or the strategy refuses the module. Then the error message is the
            strategy's own error message.
        TrainingError: The training fails under the strategy or on one device.
    """
    if precision not in PRECISIONS:
        raise ConfigurationError(f"precision={precision}: verify trains in one of {', '.join(PRECISIONS)}")
    if isinstance(strategy, str):
        strategy = forked(strategy)

    def train(role: RunRole) -> None:
        seed_everything(0, verbose=False)
        alone = role.of is not None
        batches = role.batches() if alone else data
        fit_arguments: dict[str, Any] = {"train_dataloaders": batches}
        make = data.train_dataloader if isinstance(data, LightningDataModule) else lambda: data
        if isinstance(data, LightningDataModule):
            fit_arguments = {"datamodule": data}
            if alone:
                data.train_dataloader = lambda: batches  # type: ignore[method-assign]
                if loaders := role.validation_batches:
                    data.val_dataloader = lambda: loaders  # type: ignore[method-assign]
        settings: dict[str, Any] = {
            "accelerator": "cpu",
            "max_steps": steps,
            "logger": DummyLogger(),
            **QUIET,
            **trainer,
            "limit_val_batches": _limit(trainer.get("limit_val_batches"), steps),
            # Schedules may depend on the user's `max_epochs`, so this value is kept. It is raised only if it would end
            # the run before `steps` steps.
            "max_epochs": max(trainer.get("max_epochs") or MANY_EPOCHS, steps),
        }
        if alone:
            settings |= {"devices": 1, "strategy": "auto", "limit_train_batches": None}
            settings["limit_val_batches"] = None if role.validation_batches else 0  # As many as under the strategy.
        else:
            settings |= {"devices": devices, "strategy": strategy}
        kept_callbacks = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
        keeper = keeper_of(role.precision)
        recorder = Recorder(role, make)
        fitting = Trainer(plugins=[*plugins, keeper], callbacks=[*kept_callbacks, recorder], **settings)
        if not alone and fitting.strategy.launcher is not None and not ranks_are_children(fitting.strategy.launcher):
            kind = type(fitting.strategy)
            raise ConfigurationError(
                f"strategy={kind.__name__}: {FORK_OPTION if accepts_start_method(kind) else FORKS}"
            )
        recorder.settle(fitting, module)
        with ranks_meet(fitting.strategy), forks_on_cpu(fitting.strategy.root_device):
            fitting.fit(module, **fit_arguments)

    return verdict_of(train, precision)


def _limit(batches: int | float | None, most: int) -> int | float:
    """Return the number of batches with which each rank validates: at most ``most``, or the user's own part of them."""
    return min(batches, most) if isinstance(batches, int) else most if batches in (None, 1.0) else float(batches)


def accepts_start_method(kind: type) -> bool:
    """Return whether a constructor of the strategy's class or of its base classes has the argument start_method."""
    constructors = [vars(base)["__init__"] for base in kind.__mro__[:-1] if "__init__" in vars(base)]
    return any("start_method" in inspect.signature(constructor).parameters for constructor in constructors)


def forked(name: str) -> str:
    """Return the registered name of a strategy's variant that forks its processes.

    Other variants start each process as a new program, which would run the user's script again.

    Raises:
        ConfigurationError: No variant of the strategy forks its processes.
    """
    for variant in (name, f"{name}_fork", name.replace("ddp", "ddp_fork", 1), name.replace("auto", "ddp_fork")):
        if variant in StrategyRegistry and "_fork" in variant:
            return variant
    raise ConfigurationError(f"strategy={name}: {FORKS}")
