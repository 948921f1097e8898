"""``verify``: train a module under a strategy and on one device with the same batches, and compare the two runs."""

import inspect
import itertools
import multiprocessing
import os
import re
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
from cnnstrategies.cluster.rendezvous import ranks_meet
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.processes import temporary_folder
from cnnstrategies.verifying.batches import BatchKeeper, DoubleBatchKeeper, same_batches, samples
from cnnstrategies.verifying.causes import likely_cause
from cnnstrategies.verifying.first_difference import TraceComparison
from cnnstrategies.verifying.recorder import END, Recorder, RunRole
from cnnstrategies.verifying.verdict import ComparedRow, Verdict, compared, differences, row_of

# Pattern for a ConfigurationError in a run's output. The error message ends at an empty line.
REFUSAL = re.compile(r"^cnnstrategies\.[\w.]+\.ConfigurationError: (.*?)(?=\n\n|\Z)", re.M | re.S)
EXCEPTION = re.compile(r"^[\w.]+(?:Error|Exception)\w*: .*", re.MULTILINE)
LAST_LINES = 30  # Number of lines of a failed run's output that the error message contains.
# Arguments of `Trainer` that turn off validation, the progress bar and the model summary.
QUIET: dict[str, Any] = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
}
NOISE = (1, 2)  # Seeds of the runs on one device with errors of rounding.
MANY_EPOCHS = 1000  # Lightning's default for `max_epochs`.
FORKS = (
    "verify needs a strategy that can fork its processes, and this strategy cannot; use ddp, hybrid_pipeline or "
    "parameter_server"
)
FORK_OPTION = (
    "verify needs a strategy that forks its processes; give the strategy start_method=fork, on the command line with "
    "--trainer.strategy.start_method fork"
)


class TrainingError(RuntimeError):
    """Error of a failed run. The error message contains the last lines of the run's output."""


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
    """Train a module for some steps under a strategy and on one device, with the same batches, and compare the results.

    Both runs start from the module's current weights, and use the module's own hooks, optimizers and schedules. They
    train in float64, or in float32 if the module cannot be trained in float64. Dropout is turned off, and batch
    normalisation uses its running statistics, except under a strategy whose layers draw and measure what they do on one
    device. The run on one device trains on global batches, which are joined from the batches that the ranks have
    loaded.

    Both runs are forked from this process. Call this function before this process trains a network or uses a GPU.

    Args:
        module: The module, as you would pass it to ``Trainer.fit``. It is not changed.
        data: The data module, or the training loader.
        strategy: The registered name of a strategy, or a strategy object that forks its processes.
        devices: Number of the strategy's processes.
        steps: Number of optimizer steps.
        callbacks: The user's callbacks. Callbacks that save checkpoints are left out.
        plugins: Plugins of the trainer. A precision plugin is not allowed, because ``verify`` uses its own.
        **trainer: Other arguments of ``Trainer`` for both runs, such as ``gradient_clip_val``.

    Returns:
        The result of the comparison: a row for each kind of value, with the differences.

    Raises:
        ConfigurationError: The strategy refuses the module. The error message is the strategy's own error message.
        TrainingError: The training fails under the strategy or on one device.
    """
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
        settings: dict[str, Any] = {
            "accelerator": "cpu",
            "max_steps": steps,
            "logger": DummyLogger(),
            **QUIET,
            **trainer,
            # Schedules may depend on the user's `max_epochs`, so this value is kept. It is raised only if it would end
            # the run before `steps` steps.
            "max_epochs": max(trainer.get("max_epochs") or MANY_EPOCHS, steps),
        }
        if alone:
            settings |= {"devices": 1, "strategy": "auto", "limit_train_batches": None}
        else:
            settings |= {"devices": devices, "strategy": strategy}
        kept_callbacks = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
        keeper = BatchKeeper() if role.single else DoubleBatchKeeper()
        recorder = Recorder(role, make)
        fitting = Trainer(plugins=[*plugins, keeper], callbacks=[*kept_callbacks, recorder], **settings)
        if not alone and fitting.strategy.launcher is not None and not ranks_are_children(fitting.strategy.launcher):
            kind = type(fitting.strategy)
            raise ConfigurationError(
                f"strategy={kind.__name__}: {FORK_OPTION if accepts_start_method(kind) else FORKS}"
            )
        recorder.settle(fitting, module)
        with ranks_meet(fitting.strategy):
            fitting.fit(module, **fit_arguments)

    return verdict_of(train)


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


def verdict_of(train: Callable[[RunRole], None]) -> Verdict:
    """Run the training under the strategy and on one device, compare the runs, and return the verdict.

    Args:
        train: Function that trains the module in one of the two roles.
    """
    notes: list[str] = []
    with temporary_folder("cnnstrategies_verify_") as folder:
        try:
            reference, tested = _runs(train, Path(folder, "float64"))
        except TrainingError as error:
            reference, tested = _runs(train, Path(folder, "float32"), single=True)
            reason = (EXCEPTION.findall(str(error)) or str(error).splitlines())[-1]
            notes.append(f"compared in float32, which is less precise, because the run in float64 failed: {reason}")
        reference_notes, tested_notes = reference.notes, tested.notes
        rows = _rows(reference, tested, END, reference_notes["parameters"])
        notes += reference_notes["turned off"]
        if not all(row.equal for row in rows):
            single = reference.single
            notes += _explanation(train, Path(folder, "every step"), single, reference_notes, tested_notes)
        rows += [_steps(reference_notes, tested_notes, tested), _logged(reference_notes, tested_notes)]
    return Verdict(tuple(rows), tuple(notes))


def _runs(
    train: Callable[[RunRole], None], folder: Path, single: bool = False, every_step: bool = False
) -> tuple[RunRole, RunRole]:
    """Train under the strategy, and then on one device with the same batches.

    Returns:
        First the run on one device, and second the run under the strategy.
    """
    tested = RunRole(folder / "tested", None, single, every_step)
    reference = RunRole(folder / "reference", tested.folder, single, every_step)
    for role in (tested, reference):
        _train_in_fork(train, role)
    return reference, tested


def _train_in_fork(train: Callable[[RunRole], None], role: RunRole) -> None:
    """Train in a forked process.

    Raises:
        ConfigurationError: The strategy refuses the module.
        TrainingError: The training fails.
    """
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


def _run(train: Callable[[RunRole], None], role: RunRole) -> None:
    """Train in the forked process of a run, and write the output to the file ``printed`` in the run's folder."""
    file = os.open(role.folder / "printed", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    try:
        train(role)
    except Exception:
        # In a notebook, `sys.stderr` does not write to file descriptor 2. The traceback must be written to this
        # descriptor, because only the descriptor is redirected to the file.
        os.write(2, traceback.format_exc().encode())
        os._exit(1)


def _pointed(train: Callable[[RunRole], None], folder: Path, reference: RunRole, tested: RunRole) -> list[str]:
    """Return lines for the user: the first value that differs by the runs' traces, and its likely cause.

    The list is empty if the traces show no difference. The run on one device is repeated twice with errors of rounding,
    to know the differences that rounding explains.
    """
    noisy = [RunRole(folder / f"noise-{seed}", tested.folder, reference.single, noise=seed) for seed in NOISE]
    for role in noisy:
        _train_in_fork(train, role)
    comparison = TraceComparison(
        reference.traces()[0],
        tested.traces(),
        [trace for role in noisy for trace in role.traces()],
        tested.notes["ranks per batch"],
        torch.float32 if reference.single else torch.float64,
    )
    difference = comparison.first()
    if difference is None:
        return []
    return [str(difference), f"likely cause: {likely_cause(difference, comparison)}"]


def _rows(reference: RunRole, tested: RunRole, file: str, parameters: Sequence[str]) -> list[ComparedRow]:
    dtype = torch.float32 if reference.single else torch.float64
    return compared(reference.folder / file, tested.folder / file, parameters, dtype)


def _steps(reference: dict[str, Any], tested: dict[str, Any], run: RunRole) -> ComparedRow:
    """Return the verdict's row with the number of steps and the number of samples.

    Args:
        reference: Notes of the run on one device.
        tested: Notes of the run under the strategy.
        run: The run under the strategy, whose batches are counted.
    """
    loaded = [samples(file.parent) for file in run.folder.glob("*/0.pt")]
    count, different = sum(count for count, _ in loaded), len(set().union(*(seen for _, seen in loaded)))
    text = f"{tested['steps']} on {count} samples, {different} of them different, loaded by {len(loaded)} of "
    text += f"{tested['devices']} processes; {reference['changed']} weights have changed"
    missing, size = run.left_out(reference["whole"]) or (0, 0)
    if missing:
        text += f"; an epoch leaves out {missing} of {size} samples, because the loader gives them to other processes"
    repeated = _repetition(run, reference["whole"], len(loaded))
    text += repeated
    if reference["steps"] != tested["steps"]:
        text += f"; one device has made {reference['steps']} steps on them"
    equal = reference["steps"] == tested["steps"] and reference["changed"] > 0 and not missing and not repeated
    return ComparedRow("steps", text, equal)


def _repetition(run: RunRole, whole: int | None, processes: int) -> str:
    """Return a text for the user if several processes load the same samples; otherwise an empty text.

    One device trains on the ranks' batches, so without this test a run whose processes all load the same samples would
    be equal to one device.

    Args:
        run: The run under the strategy.
        whole: Number of samples that one process loads in an epoch; None if the number is not known.
        processes: Number of processes that load samples.
    """
    remedy = "leave trainer.use_distributed_sampler on, or give the loader a sampler for each process"
    if ranks := same_batches([file.parent for file in run.folder.glob("*/0.pt")]):
        return f"; processes {ranks[0]} and {ranks[1]} load the same batches: {remedy}"
    loaded = run.loaded_in_an_epoch()
    if processes > 1 and whole and loaded is not None and loaded >= 2 * whole:
        return f"; an epoch loads {loaded} samples, and {whole} in one process: {remedy}"
    return ""


def _logged(reference: dict[str, Any], tested: dict[str, Any]) -> ComparedRow:
    """Return the verdict's row for the logged values.

    Values that are logged without a reduction over the ranks cover only the batches of rank 0, so they may differ from
    the values of the run on one device. The row lists the names of such values, but they do not make the runs unequal.
    """
    dtype = torch.float32  # The dtype of Lightning's logged values and of torchmetrics.
    unreduced = {name for name in tested["unreduced"] if name in reference["logged"] and tested["devices"] > 1}
    reduced = [
        {name: value for name, value in notes["logged"].items() if name not in unreduced}
        for notes in (reference, tested)
    ]
    row = row_of("logged", list(differences(reduced[0], reduced[1], dtype)))
    all_values = differences(reference["logged"], tested["logged"], dtype)
    named = sorted({difference.name for difference in all_values if not difference.is_equal} & unreduced)
    text = f"; not compared, because they cover only rank 0's batches: {', '.join(named)} (set sync_dist=True)"
    text = text if named else ""
    return ComparedRow(row.name, row.text + text, row.equal)


def _explanation(
    train: Callable[[RunRole], None],
    folder: Path,
    single: bool,
    reference_notes: dict[str, Any],
    tested_notes: dict[str, Any],
) -> list[str]:
    """Repeat both runs with a checkpoint after each step, to find the first step after which the runs differ.

    Returns:
        Lines for the user: the first difference, and possible causes.
    """
    causes = [f"unlike one device: {line}" for line in tested_notes["unlike one device"]]
    if reference_notes["draws"]:
        causes.append(
            "the training step or a batch hook draws random numbers (as for mixup), and each process draws different "
            "numbers"
        )
    reference, tested = _runs(train, folder, single=single, every_step=True)
    if pointed := _pointed(train, folder, reference, tested):
        return [*pointed, *causes]
    parameters = reference_notes["parameters"]
    for step in itertools.count(1):
        file = f"step-{step}.ckpt"
        if not (reference.folder / file).exists() or not (tested.folder / file).exists():
            break
        for row in _rows(reference, tested, file, parameters):
            if not row.equal:
                return [f"first difference after step {step}: {row.name}: {row.text}", *causes]
    if all(row.equal for row in _rows(reference, tested, END, parameters)):
        return [
            "with a checkpoint after each step the runs are equal: without checkpoints, weights are used before they "
            "have arrived",
            *causes,
        ]
    return ["first difference after the last step", *causes]
