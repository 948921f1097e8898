"""The guard finds nothing while published networks and modules train; `make test-zoo-guard` runs this file.

Each module makes six steps in float32 under a strategy, with checks after the first, the fifth and the last step, and
layers that are computed twice in the fourth step. Between two checks lie four steps, in which each gradient is measured
once. A user's guard names a weight that does not change only if the checks are ten steps apart; here four are enough.
Findings are written to files for the page of false alarms. A strategy may refuse a module: the other tests of the zoo
say which refusals are expected.

Small entries are trained first. With `CNNSTRATEGIES_ZOO_CONTINUE=1`, pairs are left out that this run has tried before,
or an earlier run whose results `benchmarks/guard/zoo_alarms.json` keeps.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from cnnstrategies.guarding import movement
from cnnstrategies.strategies import BalancedDDPStrategy, SpatialStrategy
from tests.conftest import ROOT
from tests.zoo.examples import LIGHTLY, METRIC_LEARNING, lightly_entry, metric_entry
from tests.zoo.modules import TORCHGEO, UNCERTAINTY, torchgeo_entry, uncertainty_entry
from tests.zoo.networks import NETWORKS, entry
from tests.zoo.trial import RESULTS, STRATEGIES, Classifier, Entry, chosen_strategies, part_of, this_code

sys.path.append(str(ROOT / "benchmarks" / "guard"))

from answers import REFUSAL
from guarded import findings_of
from programs import Program

STEPS, EVERY, REPLAYED = 6, 5, 4
SECONDS = 560.0  # Time limit of a run.
ALARMS, EARLIER = RESULTS / "alarms", ROOT / "benchmarks" / "guard" / "zoo_alarms.json"
ENTRIES: dict[str, Callable[[], Entry]] = {
    **{f"pytorch_metric_learning.{name}": partial(metric_entry, name) for name in METRIC_LEARNING},
    **{f"lightly.{name}": partial(lightly_entry, name) for name in LIGHTLY},
    **{f"torch_uncertainty.{name}": partial(uncertainty_entry, name) for name in UNCERTAINTY},
    **{f"torchgeo.{name}": partial(torchgeo_entry, name) for name in TORCHGEO},
    **{name: partial(entry, name) for name in sorted(NETWORKS, key=lambda name: NETWORKS[name][1])},
}
MORE: Mapping[str, Callable[[], Any]] = {
    "ddp_balanced": partial(BalancedDDPStrategy, shares="equal", find_unused_parameters=True, start_method="fork"),
    "spatial": partial(SpatialStrategy, parts=2, start_method="fork"),
}


def pairs() -> list[tuple[str, str]]:
    """Return the names of all entries and strategies in the order in which they are trained."""
    strategies = list(chosen_strategies([*STRATEGIES, *MORE]))
    return [(name, strategy) for name in ENTRIES for strategy in strategies]


class Loaded(LightningDataModule):
    """Data module of a loader, which is also the loader for validations: torchgeo's schedules need a validation.

    Args:
        data: Function that makes the loader.
    """

    def __init__(self, data: Callable[[], DataLoader[Any]]) -> None:
        super().__init__()
        self.data = data

    def train_dataloader(self) -> DataLoader[Any]:
        return self.data()

    def val_dataloader(self) -> DataLoader[Any]:
        return self.data()


def alarms_of(name: str, strategy: str) -> dict[str, Any]:
    """Train an entry under a strategy, and return the findings, the notes, and the line with which it is refused."""
    tried = ENTRIES[name]()
    module, chosen, devices = tried.strategy("ddp" if strategy in MORE else strategy)
    if isinstance(module, Classifier):  # A trial of the loss would take longer than the six steps of a deep network.
        module.loss_divisor = "samples"  # type: ignore[assignment]  # an attribute that modules may have
    if strategy in MORE:
        chosen = MORE[strategy]()
    program: Any = Program(module, Loaded(tried.data), chosen)  # type: ignore[arg-type]  # any module can be guarded
    program.trainer["limit_val_batches"] = 1
    movement.ENOUGH = EVERY - 1
    try:
        findings = findings_of(program, STEPS, devices, EVERY, REPLAYED, SECONDS)
    except RuntimeError as error:
        if refusals := re.findall(REFUSAL, str(error)):
            return {"refused": refusals[-1]}
        raise
    return {
        "findings": [str(finding) for finding in findings if not finding.is_note],
        "notes": sorted({str(finding) for finding in findings if finding.is_note}),
    }


@pytest.mark.parametrize(("name", "strategy"), part_of(pairs()))
def test_the_guard_is_silent(name: str, strategy: str) -> None:
    file = ALARMS / f"{name}.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    earlier = json.loads(EARLIER.read_text()).get(name, {})
    if "CNNSTRATEGIES_ZOO_CONTINUE" in os.environ and strategy in {*results, *earlier}:
        return
    results[strategy] = alarms_of(name, strategy) | {"measured": this_code()}
    ALARMS.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results))
    assert not results[strategy].get("findings"), results[strategy]
