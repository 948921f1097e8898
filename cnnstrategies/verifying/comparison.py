"""Compare the run under a strategy with the run on one device, and find the cause of a difference."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cnnstrategies.runtime.processes import temporary_folder
from cnnstrategies.verifying.batches import Precision
from cnnstrategies.verifying.causes import likely_cause
from cnnstrategies.verifying.first_difference import LEAST, TraceComparison
from cnnstrategies.verifying.forked_runs import Train, TrainingError, train_both, train_with_noise
from cnnstrategies.verifying.recorder import END, VALIDATED, RunRole
from cnnstrategies.verifying.verdict import ComparedRow, Verdict, compared, differences, row_of, tolerance_of

EXCEPTION = re.compile(r"^[\w.]+(?:Error|Exception)\w*: .*", re.MULTILINE)


def verdict_of(train: Train, precision: Precision) -> Verdict:
    """Run the training under the strategy and on one device, compare the runs, and return the verdict.

    Args:
        train: Function that trains the module in one of the two roles.
        precision: Precision of the runs. If the training fails in float64, float32 is tried.
    """
    notes: list[str] = []
    with temporary_folder("cnnstrategies_verify_") as folder:
        try:
            reference, tested = train_both(train, Path(folder, precision), precision)
        except TrainingError as error:
            if precision != "64-true":
                raise
            precision = "32-true"
            reference, tested = train_both(train, Path(folder, precision), precision)
            reason = (EXCEPTION.findall(str(error)) or str(error).splitlines())[-1]
            notes.append(f"compared in float32, which is less precise, because the run in float64 failed: {reason}")
        noisy = [] if precision == "64-true" else train_with_noise(train, Path(folder, precision), tested)
        reference_notes, tested_notes = reference.notes, tested.notes
        rows = [*_rows(reference, tested, noisy, END), *_other_ranks(reference, tested, noisy)]
        notes += tested_notes["samples"]
        notes += reference_notes["turned off"]
        if not all(row.equal for row in rows):
            notes += _explanation(train, Path(folder, "repeated"), tested, noisy, reference_notes, tested_notes)
        rows += [_steps(reference_notes, tested_notes, tested), _logged(reference_notes, tested_notes, noisy)]
    return Verdict(tuple(rows), tuple(notes))


def _pointed(train: Train, folder: Path, reference: RunRole, tested: RunRole, noisy: Sequence[RunRole]) -> list[str]:
    """Return lines for the user: the first value that differs by the runs' traces, and its likely cause.

    If the traces show no difference, the list has the first value that is NaN or infinite in both runs, or is empty.

    Args:
        train: Function that trains the module.
        folder: Folder for the files of more runs.
        reference: The run on one device, with a trace.
        tested: The run under the strategy, with traces.
        noisy: Runs with errors of rounding on the same batches; empty if there are no such runs yet.
    """
    comparison = TraceComparison(
        reference.traces()[0],
        tested.traces(),
        [trace for role in noisy or train_with_noise(train, folder, tested) for trace in role.traces()],
        tested.notes["ranks per batch"],
        LEAST[reference.precision],
    )
    difference = comparison.first()
    if difference is None:
        return [text] if (text := comparison.first_undefined()) else []
    return [str(difference), f"likely cause: {likely_cause(difference, comparison)}"]


def _rows(reference: RunRole, tested: RunRole, noisy: Sequence[RunRole], file: str) -> list[ComparedRow]:
    files = [role.folder / file for role in (reference, tested, *noisy)]
    return compared(files[0], files[1], files[2:], reference.notes["parameters"], reference.precision)


def _other_ranks(reference: RunRole, tested: RunRole, noisy: Sequence[RunRole]) -> list[ComparedRow]:
    """Return a row if weights or buffers of a rank differ at the end; the checkpoint has only those of rank 0."""
    (expected,), others = reference.states(), [role.states()[0] for role in noisy]
    tolerance = tolerance_of(reference.precision, expected, others)
    for rank, state in enumerate(tested.states()[1:], 1):
        row = row_of(f"rank {rank}", list(differences(expected, state, tolerance)))
        if not row.equal:
            return [row]
    return []


def _steps(reference: dict[str, Any], tested: dict[str, Any], run: RunRole) -> ComparedRow:
    """Return the verdict's row with the number of steps and the number of samples.

    Args:
        reference: Notes of the run on one device.
        tested: Notes of the run under the strategy.
        run: The run under the strategy, whose batches are counted.
    """
    loaded = run.loaded
    different, processes = len(set(loaded.all_samples)), sum(bool(rank.batches) for rank in loaded.ranks)
    text = (
        f"{tested['steps']} on {len(loaded.all_samples)} samples, {different} of them different, loaded by {processes}"
    )
    text += f" of {tested['devices']} processes; {reference['changed']} weights have changed"
    if tested["validations"]:
        files = len([*run.folder.glob(f"{VALIDATED}/*/*/*/*.pt")])
        text += f"; validations: {tested['validations']} on {files} batches"
    faults = [*loaded.faults(reference["whole"]), *filter(None, [reference["other contents"]])]
    text += "".join(f"; {fault}" for fault in faults)
    if reference["steps"] != tested["steps"]:
        text += f"; one device has made {reference['steps']} steps on them"
    equal = reference["steps"] == tested["steps"] and reference["changed"] > 0 and not faults
    return ComparedRow("steps", text, equal)


def _logged(reference: dict[str, Any], tested: dict[str, Any], noisy: Sequence[RunRole]) -> ComparedRow:
    """Return the verdict's row for the logged values.

    Values that are logged without a reduction over the ranks cover only the batches of rank 0, so they may differ from
    the values of the run on one device. The row lists the names of such values, but they do not make the runs unequal.
    """
    # Lightning's logged values and torchmetrics are in float32.
    tolerance = tolerance_of("32-true", reference["logged"], [role.notes["logged"] for role in noisy])
    unreduced = {name for name in tested["unreduced"] if name in reference["logged"] and tested["devices"] > 1}
    reduced = [
        {name: value for name, value in notes["logged"].items() if name not in unreduced}
        for notes in (reference, tested)
    ]
    row = row_of("logged", list(differences(reduced[0], reduced[1], tolerance)))
    all_values = differences(reference["logged"], tested["logged"], tolerance)
    named = sorted({difference.name for difference in all_values if not difference.is_equal} & unreduced)
    text = f"; not compared, because they cover only rank 0's batches: {', '.join(named)} (set sync_dist=True)"
    text = text if named else ""
    return ComparedRow(row.name, row.text + text, row.equal)


def _explanation(
    train: Train,
    folder: Path,
    first: RunRole,
    noisy: Sequence[RunRole],
    reference_notes: dict[str, Any],
    tested_notes: dict[str, Any],
) -> list[str]:
    """Repeat both runs with traces, and with a checkpoint after each step if the traces show no difference.

    Args:
        train: Function that trains the module.
        folder: Folder for the files of the repeated runs.
        first: The run under the strategy that is repeated.
        noisy: Runs with errors of rounding on the batches of that run.
        reference_notes: Notes of the run on one device.
        tested_notes: Notes of the run under the strategy.

    Returns:
        Lines for the user: the first difference, and possible causes.
    """
    causes = [f"unlike one device: {line}" for line in tested_notes["unlike one device"]]
    if reference_notes["draws"]:
        causes.append(
            "the training step or a batch hook draws random numbers (as for mixup), and each process draws different "
            "numbers"
        )
    reference, tested = train_both(train, folder / "traced", first.precision, saves_trace=True)
    same = noisy if tested.loaded.equals(first.loaded) else []
    if pointed := _pointed(train, folder, reference, tested, same):
        return [*pointed, *causes]
    # Only checkpoints have the states of optimizers.
    reference, tested = train_both(train, folder / "saved", first.precision, saves_steps=True)
    for step in itertools.count(1):
        file = f"step-{step}.ckpt"
        if not (reference.folder / file).exists() or not (tested.folder / file).exists():
            break
        for row in _rows(reference, tested, [], file):
            if not row.equal:
                return [f"first difference after step {step}: {row.name}: {row.text}", *causes]
    if all(row.equal for row in _rows(reference, tested, noisy, END)):
        return [
            "with a checkpoint after each step the runs are equal: without checkpoints, weights are used before they "
            "have arrived",
            *causes,
        ]
    return ["first difference after the last step", *causes]
