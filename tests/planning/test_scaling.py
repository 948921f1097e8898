"""Tests of `scaling`: each planted cause is the first reason, with its remedy and gain; a healthy run has no reason."""

from dataclasses import replace

import pytest

from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.scaling import report
from cnnstrategies.planning.scaling.figures import EpochCosts, Facts, MeasuredRun, Measurements, Rank, Sample
from cnnstrategies.planning.scaling.reasons import RULES, reasons

pytestmark = pytest.mark.light

SAMPLES = 32
PARTS = {"data": 0.001, "transfer": 0.0005, "forward": 0.03, "backward": 0.06, "optimizer": 0.004, "other": 0.002}
STEP = 0.1
KEYS = {"num_workers": 0, "batch_size": SAMPLES}
HEALTHY = Facts(
    cores=8,
    loader=10 * 2 * SAMPLES / STEP,
    load=Sample(1e-4, 1e-4, 1e-4),
    link=0.02,
    gradient_bytes=4_000_000,
    epoch=EpochCosts(100, 0.5, 0.1),
    keys=KEYS,
)


def run(*ranks, rounds=5):
    """Return a run whose ranks wait for the slowest rank in their all-reduce.

    Args:
        ranks: For each rank, the additional seconds of a step by part.
        rounds: Number of measured rounds.
    """
    rank_parts = [{**PARTS, **{name: PARTS.get(name, 0.0) + more for name, more in extra.items()}} for extra in ranks]
    step = max(sum(parts.values()) for parts in rank_parts) + 0.0025 * (len(ranks) > 1)
    waiting = [
        {**parts, "communication": parts.get("communication", 0.0) + step - sum(parts.values())} for parts in rank_parts
    ]
    rates = [len(ranks) * SAMPLES / step] * rounds
    return MeasuredRun([Rank(SAMPLES, parts, ("communication",)) for parts in waiting], rates)


def measurements(*more, **facts):
    """Return the measurements of a run on two ranks.

    Args:
        more: For each rank, the additional seconds of a step by part.
        facts: Facts that differ from the healthy run's facts.
    """
    ranks = more or ({}, {})
    largest = run(*ranks)
    larger = 4 * largest.slowest.compute / 1.1
    return Measurements([run(ranks[0]), largest], replace(HEALTHY, **{"larger": larger, **facts}))


def both(**more):
    return (more, more)


LOADS = {"loader": 2 * SAMPLES / 0.16}
PLANTED = {
    "slow loader": (
        measurements(*both(data=0.15), load=Sample(0.005, 0.005, 0.005), **LOADS),
        "the loader is slower",
        {"data.init_args.num_workers": 2},
    ),
    "slow disk": (
        measurements(*both(data=0.15), load=Sample(0.005, 0.0005, 0.005), **LOADS),
        "waits for storage",
        {"data.init_args.num_workers": 2},
    ),
    "interpreter's lock": (
        measurements(*both(data=0.15), load=Sample(0.005, 0.005, 0.01), **LOADS),
        "interpreter's lock",
        {"data.init_args.num_workers": 2},
    ),
    "slow rank": (
        measurements({}, {"forward": 0.03, "backward": 0.06}),
        "rank 1 is slower",
        {"trainer.strategy": "ddp_balanced"},
    ),
    "slow link": (
        measurements(*both(communication=0.3), link=0.32),
        "the link is slow",
        {"trainer.strategy": "ddp_bf16"},
    ),
    "threads": (
        measurements(*both(forward=0.1, backward=0.2), threads=8, cores=2, with_fewer=2 * SAMPLES / STEP),
        "threads compete",
        {"ComputeSettings.threads": 1},
    ),
    "host reads": (
        measurements(*both(forward=0.05), accelerator=True, reads={"module.py:7": 1.0}, read_seconds=0.05),
        "makes the process wait",
        {},
    ),
    "callback": (measurements(*both(**{"callback Sleeper": 0.05})), "Sleeper takes long", {}),
    "small batches": (
        measurements(larger=1.2 * 0.094),
        "batches are small",
        {"data.init_args.batch_size": 4 * SAMPLES},
    ),
    "validation": (
        measurements(epoch=EpochCosts(100, 15.0, 0.1)),
        "validation takes long",
        {"trainer.check_val_every_n_epoch": 15},
    ),
    "logger": (
        measurements(*both(**{"logger HugeLogger": 0.05}), log_every=1),
        "loggers take long",
        {"trainer.log_every_n_steps": 50},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_comes_first_with_its_remedy(name):
    planted, cause, values = PLANTED[name]
    first = reasons(planted)[0]
    assert cause in first.cause
    assert first.values == values
    assert first.gain > 1.2
    lines = "\n".join(report.sentences(planted, [first]))
    assert first.remedy in lines
    assert f"{first.gain:.2f} times" in lines


def test_a_healthy_run_has_no_reason_and_reports_its_distance_from_the_limit():
    assert reasons(measurements()) == []
    lines = report.sentences(measurements(), [])
    assert any(line.startswith("No cause was found: training reaches 94% of the samples/s") for line in lines)


def test_every_rule_finds_its_planted_cause():
    seen = {rule.__name__ for rule in RULES for planted, _, _ in PLANTED.values() if any(True for _ in rule(planted))}
    slow = measurements(*both(transfer=0.05), epoch=EpochCosts(100, 0.5, 5.0))
    assert {reason.cause for reason in reasons(slow)} == {
        "the transfer of batches to the device is slow",
        "checkpoints take long",
    }
    assert seen | {"checkpoints", "transfer"} == {rule.__name__ for rule in RULES}


def test_a_gain_is_the_speedup_of_removing_the_cause():
    """If epochs consist of steps only, the gain of a remedy is the gain in the time of a step."""
    sleeps = measurements(*both(**{"callback Sleeper": 0.05}), epoch=EpochCosts())
    assert reasons(sleeps)[0].gain == pytest.approx(0.15 / 0.1)
    balanced = reasons(measurements({}, {"forward": 0.03, "backward": 0.06}, epoch=EpochCosts()))[0]
    compute, slow = 0.094, 0.184
    step = 0.19
    assert balanced.gain == pytest.approx(step / (step - slow + 2 / (1 / compute + 1 / slow)))
    assert balanced.effect is Effect.ROUNDING


def test_loaders_that_compute_get_no_more_processes_than_cores():
    """Loaders that wait for storage may have more processes than cores; for others, a different remedy is proposed."""
    busy = measurements(*both(data=0.15), load=Sample(0.005, 0.005, 0.005), cores=2, **LOADS)
    assert reasons(busy)[0].values == {}
    assert "shards" in reasons(busy)[0].remedy
    waits = measurements(*both(data=0.15), load=Sample(0.005, 0.0005, 0.005), cores=2, **LOADS)
    assert reasons(waits)[0].values == {"data.init_args.num_workers": 2}


def test_settings_that_a_configuration_does_not_have_are_not_written():
    own_data = measurements(*both(data=0.15), load=Sample(0.005, 0.005, 0.005), keys={}, **LOADS)
    assert reasons(own_data)[0].values == {}
    own_strategy = measurements({}, {"forward": 0.06, "backward": 0.06}, strategy="hybrid_pipeline")
    assert reasons(own_strategy)[0].values == {}


def test_stages_with_different_times_are_not_reported_as_slow_ranks():
    slow = measurements({}, {"forward": 0.06, "backward": 0.06}, strategy="hybrid_pipeline")
    ranks = [replace(rank, waiting=("communication", "receive")) for rank in slow.largest.ranks]
    stages = replace(slow, runs=[slow.runs[0], replace(slow.largest, ranks=ranks)])
    assert "slower than the other ranks" in reasons(slow)[0].cause
    assert reasons(stages) == []


def test_the_table_adds_up_and_names_weak_and_strong_scaling():
    slow = measurements({}, {"forward": 0.03, "backward": 0.06})
    kinds = report.by_kind(slow.largest)
    assert sum(kinds.values()) == pytest.approx(slow.largest.step)
    assert kinds[report.WAITS_FOR_OTHERS] == pytest.approx(0.045)
    assert "weak scaling" in report.sentences(slow, [])[0]
    halves = replace(
        slow, runs=[slow.runs[0], MeasuredRun([replace(rank, samples=16) for rank in slow.largest.ranks], [100.0])]
    )
    assert "each of 2 devices has 16 samples (strong scaling)" in report.sentences(halves, [])[0]
