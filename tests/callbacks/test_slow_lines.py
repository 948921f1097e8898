"""Lines about slow steps: no line for noise, one line with the cause for each lasting change, and one for its end."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies import ImageClassifier
from cnnstrategies.callbacks import SlowLines, slow_changes, slow_steps, step_blocks
from cnnstrategies.callbacks.level import Evidence
from cnnstrategies.callbacks.slow_changes import STEPS, SlowChange, SlowSteps, StepBlock, StepsEnded, usual_of
from cnnstrategies.callbacks.slow_steps import BlockExchange, line_about, line_about_end
from cnnstrategies.cluster.hosts import Interconnect
from cnnstrategies.commands.run.outcome import ends_together
from cnnstrategies.strategies import HybridPipelineStrategy, SpatialStrategy
from tests.conftest import PlainCNN, quiet_trainer
from tests.runner.forked import run_forked
from tests.runner.ranks import run_started

CALM, AFTER = 40, 9  # Numbers of blocks before and after a planted change.


def noise(kind: str, random: np.random.Generator, steps: int) -> np.ndarray:
    """Return step times around 1 with noise of a kind."""
    if kind == "correlated":
        level, levels = 0.0, []
        for shock in random.normal(0, 0.04, steps):
            level = 0.9 * level + shock
            levels.append(level)
        return np.exp(levels)
    return {
        "normal": lambda: random.normal(1, 0.1, steps).clip(0.3),
        "lognormal": lambda: np.exp(random.normal(0, 0.3, steps)),
        "heavy tails": lambda: 0.9 + 0.1 * random.pareto(1.1, steps),
        "student": lambda: 1 + 0.1 * np.abs(random.standard_t(2, steps)),
        "drift": lambda: np.linspace(1, 1.3, steps) + random.normal(0, 0.05, steps),
        "two sizes": lambda: random.choice([1.0, 1.0, 2.0], steps) + random.normal(0, 0.05, steps),
        "bursts": lambda: 1 + np.convolve(random.random(steps) < 0.005, np.ones(12))[:steps].clip(0, 1),
        "first steps of epochs": lambda: random.normal(1, 0.05, steps) + 3 * (np.arange(steps) % 9 == 0),
    }[kind]()


KINDS = (
    *("normal", "lognormal", "heavy tails", "student", "drift", "two sizes", "bursts", "first steps of epochs"),
    "correlated",
)


@pytest.mark.light
def test_noise_has_no_line_and_each_planted_change_is_found_within_50_steps() -> None:
    """In 1,008 series of two ranks, each with a validation that grows and a checkpoint of random length."""
    for seed in range(1008):
        random = np.random.default_rng(seed)
        steps = (CALM + AFTER) * STEPS
        seconds = 0.2 * noise(KINDS[seed % len(KINDS)], random, steps)
        at = CALM * STEPS + int(random.integers(STEPS))
        seconds[at:] *= random.uniform(2.5, 4)
        machine = SlowSteps()
        changes: list[tuple[int, Any]] = []
        for number in range(CALM + AFTER):
            usual = usual_of(seconds[number * STEPS : (number + 1) * STEPS].tolist())
            occurrences = {}
            if number % 2:
                occurrences["checkpoint"] = (1, 0.4 * float(np.exp(random.normal(0, 0.4))))
                occurrences["validation"] = (1, 0.3 * 1.05**number)
            blocks = [
                StepBlock(number, number * STEPS, STEPS, usual, share * usual, 0.0, 0.0, (1 - share) * usual, entry)
                for share, entry in ((0.9, occurrences), (0.5, {}))
            ]
            changes += [((number + 1) * STEPS, event) for event in machine.add(blocks)]
        assert len(changes) == 1, (seed, KINDS[seed % len(KINDS)], changes)
        reported, change = changes[0]
        assert 0 < reported + slow_steps.READ_AFTER - at <= 50
        assert (change.part, change.ranks[0]) == ("compute", 0)


def series(
    parts: Sequence[Mapping[str, float]],
    planted: Mapping[int, Mapping[str, float]],
    occurrences: Mapping[str, tuple[int, float]] | None = None,
) -> list[SlowChange | StepsEnded]:
    """Return the changes in 20 blocks, then 10 blocks with planted seconds of ranks, then 10 blocks as before."""
    machine, changes = SlowSteps(), []
    for number in range(40):
        later = 20 <= number < 30
        figures = [
            {name: seconds + planted.get(rank, {}).get(name, 0.0) * later for name, seconds in part.items()}
            for rank, part in enumerate(parts)
        ]
        totals = [sum(each.values()) for each in figures]
        blocks = [
            StepBlock(number, 7 * number, 7, max(totals), **{**each, "waited": each["waited"] + max(totals) - total},
                      occurrences={name: pair for name, pair in (occurrences or {}).items() if later})
            for each, total in zip(figures, totals, strict=True)
        ]  # fmt: skip
        changes += machine.add(blocks)
    return changes


USUAL = {"compute": 0.2, "data": 0.01, "rest": 0.01, "waited": 0.02}


@pytest.mark.light
@pytest.mark.parametrize(
    ("planted", "text"),
    [
        ({1: {"compute": 0.1}}, "the own work of rank 1 takes 300 ms (200 ms before)"),
        ({rank: {"compute": 0.1} for rank in range(3)}, "the own work of each rank takes 300 ms (200 ms before)"),
        ({2: {"data": 0.1}}, "rank 2 waits 110 ms (10 ms before) for the data loader"),
        ({0: {"rest": 0.1}, 1: {"rest": 0.1}}, "ranks 0, 1 are busy between the steps for 110 ms (10 ms before)"),
        ({0: {"data": 0.1}, 2: {"data": 0.1}}, "ranks 0, 2 wait 110 ms (10 ms before) for the data loader"),
        ({rank: {"rest": 0.1} for rank in range(3)}, "each rank is busy between the steps for 110 ms (10 ms before)"),
        ({rank: {"waited": 0.1} for rank in range(3)}, "but the ranks wait 120 ms (20 ms before) for messages"),
    ],
)
def test_a_line_names_the_part_that_has_grown_and_its_rank(planted: Any, text: str) -> None:
    change, end = series([USUAL] * 3, planted)
    assert isinstance(change, SlowChange)
    assert isinstance(end, StepsEnded)
    line = line_about(change, "replica", "the process")
    assert line.startswith("slow since step 140: ")
    assert text in line
    assert "a step takes 340 ms (240 ms before): " in line
    assert line_about_end(end) == "not slow any more since step 210: a step takes 240 ms (340 ms before)"


@pytest.mark.light
def test_a_slow_loader_is_named_if_other_ranks_take_over_its_samples() -> None:
    """The ranks have other shares two blocks after the loader has become slow, so a step takes as long as before."""
    machine, changes = SlowSteps(), []
    for number in range(60):
        is_slow, is_shifted = 30 <= number < 50, 32 <= number < 50
        data = (0.15 if is_shifted else 0.4) * is_slow + 0.01
        compute = (0.05, 0.22) if is_shifted else (0.2, 0.2)
        step = max(data + compute[0], compute[1]) + 0.02
        blocks = [
            StepBlock(number, 7 * number, 7, step, each, data * (rank == 0), 0.0, 0.0, {})
            for rank, each in enumerate(compute)
        ]
        changes += [(number, event) for event in machine.add(blocks)]
    (at, change), (_, end) = changes
    assert 7 * at - 7 * 30 <= 50
    text = "slow since step 210: rank 0 waits 160 ms (10 ms before) for the data loader; a step takes 240 ms (230 ms "
    assert line_about(change, "replica", "the process").startswith(text)
    assert isinstance(end, StepsEnded)


@pytest.mark.light
def test_a_loader_that_waits_in_place_of_its_rank_has_no_line() -> None:
    """Rank 0 waits for rank 1 in each step, so its loader may take longer."""
    machine = SlowSteps()
    for number in range(60):
        data = 0.1 if number >= 30 else 0.01
        ranks = ((0.1, data, 0.12 - data), (0.2, 0.01, 0.01))
        blocks = [StepBlock(number, 7 * number, 7, 0.22, *each[:2], 0.0, each[2], {}) for each in ranks]
        assert list(machine.add(blocks)) == []


@pytest.mark.light
def test_a_callback_of_each_step_and_a_wait_for_servers_are_named() -> None:
    change, _ = series([USUAL], {0: {"waited": 0.1}}, {"Draws": (7, 0.1)})
    assert "Draws takes 100 ms (0 ms before) on the process" in line_about(change, "replica", "the process")
    change, _ = series([USUAL], {0: {"waited": 0.1}})
    assert "worker 3 waits 120 ms (20 ms before) for the servers" in line_about(change, "worker", "worker 3")


@pytest.mark.light
@pytest.mark.parametrize("name", ["validation", "checkpoint", "Draws"])
def test_an_action_that_does_not_run_in_each_step_is_named_after_four_long_runs(name: str) -> None:
    machine, changes = SlowSteps(), []
    for number in range(60):
        # The action runs in every other block.
        entries = {name: (1, 3.0 if 30 <= number < 50 else 0.5)} if number % 2 else {}
        blocks = [StepBlock(number, 7 * number, 7, 0.2, 0.2, 0.0, 0.0, 0.0, each) for each in ({}, entries)]
        changes += [(number, event) for event in machine.add(blocks)]
    (at, change), (_, end) = changes
    assert at == 37
    assert (change.name, change.ranks, change.before, change.after) == (name, (1,), 0.5, 3.0)
    assert "takes 3 s each time (500 ms before)" in line_about(change, "replica", "the process")
    assert f"{'saving a checkpoint' if name == 'checkpoint' else name}; it takes 500 ms now" in line_about_end(end)


def block(number: int, **changed: Any) -> StepBlock:
    return dataclasses.replace(
        StepBlock(number, 7 * number, 7, 0.5, 0.5, 0.0, 0.0, 0.0, {"Draws": (2, 0.1)}), **changed
    )


@pytest.mark.light
def test_rank_zero_gets_the_blocks_of_all_ranks_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_steps, "EVERY", 0.0)
    store = HashStore()
    ranks = [BlockExchange(store, rank, 3) for rank in range(3)]
    for number in range(2):
        for rank in (0, 1):
            ranks[rank].add(block(number, step=rank + 0.5))
    assert ranks[0].complete() == []
    for number in range(2):
        ranks[2].add(block(number, step=2.5))
    ranks[0].add(block(2))
    first, second = ranks[0].complete()
    assert [each.step for each in first] == [0.5, 1.5, 2.5]
    assert [each.number for each in second] == [1, 1, 1]
    assert first[2].occurrences == {"Draws": (2, 0.1)}
    assert ranks[0].complete() == []


@pytest.mark.light
@pytest.mark.parametrize("text", [b"[", b"{}", b"[1]", b'[{"number": 1}]'])
def test_a_message_that_is_not_of_blocks_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON|fields|Expecting"):
        step_blocks.decode(text)
    for changed in ({"step": float("nan")}, {"number": -1}, {"steps": 0}, {"first": 0.5}, {"data": True}):
        with pytest.raises(ValueError, match=r"type|range"):
            step_blocks.decode(step_blocks.encode([block(**{"number": 1, **changed})]).encode())


class Slow(Callback):
    """Callback that sleeps on a rank in each step from one step on until another."""

    def __init__(self, rank: int, where: str) -> None:
        self.rank = rank
        self.where = where

    def sleep(self, trainer: Any, where: str) -> None:
        if where == self.where and trainer.global_rank == self.rank and 20 <= trainer.global_step < 32:
            time.sleep(0.4)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.sleep(trainer, "callback")


class Classifier(ImageClassifier):
    """Classifier whose training step sleeps, which the ranks do not know of."""

    def training_step(self, *args: Any) -> Any:
        (slow,) = (callback for callback in self.trainer.callbacks if isinstance(callback, Slow))
        slow.sleep(self.trainer, "step")
        return super().training_step(*args)


def train(strategy: Any, slow: Slow, devices: int) -> None:
    for module, names in {
        slow_steps: {"FIRST": 2, "EVERY": 0.0, "STEPS": 2, "READ_AFTER": 1},
        slow_changes: {"SHORTEST": 0.0, "LEAST_SECONDS": 0.2, "EACH_STEP": Evidence(3, 3, (4, 10), 5.0)},
        step_blocks: {"STEPS": 2},
    }.items():
        for name, value in names.items():
            setattr(module, name, value)

    def main() -> None:
        data = TensorDataset(torch.rand(768, 1, 8, 8), torch.zeros(768, dtype=torch.int64))
        trainer = quiet_trainer(
            strategy(), devices, callbacks=[slow, SlowLines()], max_epochs=1, limit_train_batches=44
        )
        profiler = trainer.profiler  # type: ignore[attr-defined]
        with ends_together(trainer, Interconnect()):
            trainer.fit(Classifier(PlainCNN(), num_classes=10), DataLoader(data, batch_size=8))
        assert trainer.profiler is profiler  # type: ignore[attr-defined]

    print("codes", run_started(devices, main))


@pytest.mark.parametrize(
    ("strategy", "devices", "slow", "text"),
    [
        (lambda: "auto", 1, Slow(0, "step"), "the own work of the process takes "),
        (lambda: "ddp", 2, Slow(1, "step"), "the own work of rank 1 takes "),
        (lambda: "ddp", 2, Slow(0, "callback"), "Slow takes "),
        (partial(HybridPipelineStrategy, cuts=["2"]), 2, Slow(1, "step"), "the own work of rank 1 takes "),
        (SpatialStrategy, 2, Slow(0, "step"), "the own work of rank 0 takes "),
    ],
    ids=["one device", "ddp", "ddp, callback", "hybrid_pipeline", "spatial"],
)
def test_a_rank_that_becomes_slow_is_named_under_each_strategy(
    strategy: Any, devices: int, slow: Slow, text: str
) -> None:
    code, output = run_forked(lambda: train(strategy, slow, devices), timeout=100)
    assert code == 0, output
    assert f"codes {[0] * devices}" in output
    first, second = (line for line in output.splitlines() if "slow" in line and "since step" in line)
    assert first.startswith("slow since step ")
    assert text in first, output
    assert second.startswith("not slow any more since step ")
