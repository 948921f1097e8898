"""``verify``: the same batches on one device and under a strategy, and what the two runs have come to."""

import itertools
import multiprocessing
import os
import re
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from cnnstrategies._lightning_private import ranks_are_children
from cnnstrategies.cluster.stores import on_loopback
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.verifying.batches import Keeps, KeepsInDouble, samples
from cnnstrategies.verifying.recorder import END, Recorder, RunRole, settle
from cnnstrategies.verifying.verdict import ComparedRow, Verdict, compared, differences, row_of

# By an exception that ends a process, in the traceback of one of its ranks too.
REFUSAL = re.compile(r"^cnnstrategies\.[\w.]+\.(?:ConfigurationError|NotHereError): (.*?)(?=\n\n|\Z)", re.M | re.S)
EXCEPTION = re.compile(r"^[\w.]+(?:Error|Exception)\w*: .*", re.MULTILINE)
LAST_LINES = 30  # of what a run that has failed has printed
# Nothing but the training: no validation, and nothing that stays.
QUIET: dict[str, Any] = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
}
MANY_EPOCHS = 1000  # Lightning's, where no number is given.
FORKS = (
    "verify runs a strategy in processes that it forks, and this one has none; give one that has, such as ddp, "
    "hybrid_pipeline or parameter_server"
)


class TrainingError(RuntimeError):
    """A run that was to be compared has failed; the message is the end of what it has printed."""


def verify(
    module: LightningModule,
    data: Any,
    strategy: str | Strategy = "ddp",
    *,
    devices: int = 2,
    steps: int = 8,
    callbacks: Sequence[Callback] = (),
    plugins: Sequence[Any] = (),
    **trainer: Any,
) -> Verdict:
    """Train a module for some steps under a strategy and on one device, on the same batches, and compare.

    Both runs start from the module as it is, in forked processes, in float64 where it can be trained so, with its own
    hooks, optimizers and schedules. Dropout is off, and batch normalisation takes its running statistics. One device
    gets the global batches, put together from what the ranks have loaded. To be called before the process has trained
    anything or used a GPU.

    Args:
        module: As it would be given to ``Trainer.fit``; it stays as it is.
        data: The data module, or the training loader.
        strategy: Its registered name, or a strategy whose processes are forked.
        devices: Processes that the strategy has.
        steps: Optimizer steps.
        callbacks: The user's own; those that save checkpoints are left out.
        plugins: Of the trainer; none of a precision.
        **trainer: Further arguments of ``Trainer``, for both runs, such as ``gradient_clip_val``.

    Returns:
        What is equal, and what is not.

    Raises:
        ConfigurationError: The strategy refuses the module; the message is the strategy's.
        TrainingError: The training fails, under the strategy or on one device.
    """
    if isinstance(strategy, str):
        strategy = forked(strategy)

    def train(role: RunRole) -> None:
        seed_everything(0, verbose=False)
        alone = role.of is not None
        settled = settle(module)
        batches = role.batches() if alone else data
        given: dict[str, Any] = {"train_dataloaders": batches}
        if isinstance(data, LightningDataModule):
            given = {"datamodule": data}
            if alone:
                data.train_dataloader = lambda: batches  # type: ignore[method-assign]
        settings: dict[str, Any] = {
            "accelerator": "cpu",
            "max_steps": steps,
            "logger": DummyLogger(),
            **QUIET,
            **trainer,
            # As many as the user gives, for schedules, but enough for the steps.
            "max_epochs": max(trainer.get("max_epochs") or MANY_EPOCHS, steps),
        }
        if alone:
            settings |= {"devices": 1, "strategy": "auto", "limit_train_batches": None}
        else:
            settings |= {"devices": devices, "strategy": strategy}
        own = [one for one in callbacks if not isinstance(one, Checkpoint)]
        keeper = Keeps() if role.single else KeepsInDouble()
        fitting = Trainer(plugins=[*plugins, keeper], callbacks=[*own, Recorder(role, settled)], **settings)
        if not alone and fitting.strategy.launcher is not None and not ranks_are_children(fitting.strategy.launcher):
            raise ConfigurationError(f"strategy={type(fitting.strategy).__name__}: {FORKS}")
        with on_loopback(fitting.strategy):
            fitting.fit(module, **given)

    return verdict_of(train)


def forked(name: str) -> str:
    """The strategy of a kind whose processes are forked; those that are programs would run the user's script again."""
    for one in (name, f"{name}_fork", name.replace("ddp", "ddp_fork", 1), name.replace("auto", "ddp_fork")):
        if one in StrategyRegistry and "_fork" in one:
            return one
    raise ConfigurationError(f"strategy={name}: {FORKS}")


def verdict_of(train: Callable[[RunRole], None]) -> Verdict:
    """Make the runs that a verdict needs, and compare them."""
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="cnnstrategies_verify_") as folder:
        try:
            one, many = _runs(train, Path(folder, "float64"))
        except TrainingError as error:
            one, many = _runs(train, Path(folder, "float32"), single=True)
            reason = (EXCEPTION.findall(str(error)) or str(error).splitlines())[-1]
            notes.append(f"in float32, and so less exact; in float64: {reason}")
        told = one.notes, many.notes
        rows = _rows(one, many, END, told[0]["parameters"])
        notes += told[0]["settled"]
        if not all(row.equal for row in rows):
            notes += _explanation(train, Path(folder, "every step"), one.single, told)
        rows += [_steps(told[0], told[1], many), _logged(told[0], told[1])]
    return Verdict(tuple(rows), tuple(notes))


def _runs(
    train: Callable[[RunRole], None], folder: Path, single: bool = False, every_step: bool = False
) -> tuple[RunRole, RunRole]:
    """A run under the strategy, and one on one device with its batches."""
    many = RunRole(folder / "many", None, single, every_step)
    one = RunRole(folder / "one", many.folder, single, every_step)
    for role in (many, one):
        role.folder.mkdir(parents=True)
        process = multiprocessing.get_context("fork").Process(target=_run, args=(train, role))
        process.start()
        process.join()
        printed = (role.folder / "printed").read_text(errors="replace")
        if process.exitcode and (refusal := REFUSAL.search(printed)):
            raise ConfigurationError(refusal[1].strip())
        if process.exitcode or not role.notes:
            last = "\n".join(printed.splitlines()[-LAST_LINES:]) or f"exit code {process.exitcode}"
            raise TrainingError(f"the training fails {'on one device' if role.of else 'under the strategy'}:\n{last}")
    return one, many


def _run(train: Callable[[RunRole], None], role: RunRole) -> None:
    """What the process of a run does; what it prints goes to a file."""
    file = os.open(role.folder / "printed", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    try:
        train(role)
    except Exception:
        os.write(2, traceback.format_exc().encode())  # In a notebook, `sys.stderr` is something else.
        os._exit(1)


def _rows(one: RunRole, many: RunRole, file: str, parameters: Sequence[str]) -> list[ComparedRow]:
    dtype = torch.float32 if one.single else torch.float64
    return compared(one.folder / file, many.folder / file, parameters, dtype)


def _steps(one: dict[str, Any], many: dict[str, Any], run: RunRole) -> ComparedRow:
    loaded = [samples(file.parent) for file in run.folder.glob("*/0.pt")]
    count, different = sum(count for count, _ in loaded), len(set().union(*(seen for _, seen in loaded)))
    text = f"{many['steps']} on {count} samples, {different} of them different, loaded by {len(loaded)} of "
    text += f"{many['devices']} processes; {one['moved']} weights have moved"
    if one["steps"] != many["steps"]:
        text += f"; one device has made {one['steps']} steps on them"
    return ComparedRow("steps", text, one["steps"] == many["steps"] and one["moved"] > 0)


def _logged(one: dict[str, Any], many: dict[str, Any]) -> ComparedRow:
    """Of the values that ranks log of their own batches alone, as under DDP, it is said which they are."""
    dtype = torch.float32  # Lightning's table and torchmetrics keep it.
    own = {name for name in many["own"] if name in one["logged"] and many["devices"] > 1}
    pair = [{name: value for name, value in told["logged"].items() if name not in own} for told in (one, many)]
    row = row_of("logged", list(differences(pair[0], pair[1], dtype)))
    differ = {one.name for one in differences(one["logged"], many["logged"], dtype) if not one.is_equal} & own
    text = f"; of rank 0's batches alone: {', '.join(sorted(differ))} (sync_dist=True makes a mean)" if differ else ""
    return ComparedRow(row.name, row.text + text, row.equal)


def _explanation(
    train: Callable[[RunRole], None], folder: Path, single: bool, told: Sequence[dict[str, Any]]
) -> list[str]:
    """After which step the runs differ first, and what may be why."""
    found = [f"unlike one device: {line}" for line in told[1]["unlike one device"]]
    if told[0]["draws"]:
        found.append(
            "the step, or what is done to its batch, draws random numbers (as mixup does): each process draws its own"
        )
    one, many = _runs(train, folder, single=single, every_step=True)
    parameters = told[0]["parameters"]
    for step in itertools.count(1):
        file = f"step-{step}.ckpt"
        if not (one.folder / file).exists() or not (many.folder / file).exists():
            break
        for row in _rows(one, many, file, parameters):
            if not row.equal:
                return [f"first after step {step}: {row.name}: {row.text}", *found]
    if all(row.equal for row in _rows(one, many, END, parameters)):
        return ["with a checkpoint after each step they are equal: weights are used before they are there", *found]
    return ["first after the last step", *found]
