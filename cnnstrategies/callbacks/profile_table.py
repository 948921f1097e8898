"""The table of a step profile."""

from collections.abc import Mapping, Sequence

from rich.table import Table
from torch import Tensor

from cnnstrategies.callbacks.step_parts import TOTAL, StepParts


def profile_table(parts: StepParts, names: Sequence[str], times: Tensor, title: str) -> Table:
    """A row for each part: its mean, those of the stages or else the least and greatest of a rank, and its share."""
    stages = stage_means(parts, names, times)
    columns = ["part", "ms", *([f"stage {stage}" for stage in range(len(stages))] or ["min", "max"]), "share", "what"]
    table = Table(*columns, title=title)
    for column in table.columns[1:-1]:
        column.justify = "right"
    means = dict(zip(names, times.mean(0).tolist(), strict=True))
    for index, name in enumerate(names):
        if name not in parts.explained:
            continue
        spread = [stage[name] for stage in stages] or [float(times[:, index].min()), float(times[:, index].max())]
        share = f"{means[name] / means[TOTAL]:.0%}"
        table.add_row(name, *(f"{figure:.2f}" for figure in (means[name], *spread)), share, parts.explained[name])
    if total := means.get("communication_total"):
        hidden = 1 - means["communication"] / total
        table.caption = f"All-reduce took {total:.2f} ms; backward hid {hidden:.0%} of it."
    if stages:
        waits = [sum(stage.get(name, 0.0) for name in parts.waiting) / stage[TOTAL] for stage in stages]
        each = ", ".join(f"stage {stage} {share:.0%}" for stage, share in enumerate(waits))
        table.caption = f"Waiting for other ranks: {each}. The others wait for the stage that waits least."
    return table


def stage_means(parts: StepParts, names: Sequence[str], times: Tensor) -> list[Mapping[str, float]]:
    """For each stage the mean of each part over its replicas."""
    return [dict(zip(names, times[list(ranks)].mean(0).tolist(), strict=True)) for ranks in parts.stages]
