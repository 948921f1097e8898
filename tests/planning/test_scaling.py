"""Each planted cause is the first reason, with a remedy whose gain is what the plant took; a healthy run has none."""

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
    """A run whose ranks wait for the slowest in their all-reduce; each is given by what it has more than the usual."""
    own = [{**PARTS, **{name: PARTS.get(name, 0.0) + more for name, more in given.items()}} for given in ranks]
    step = max(sum(parts.values()) for parts in own) + 0.0025 * (len(ranks) > 1)
    waiting = [
        {**parts, "communication": parts.get("communication", 0.0) + step - sum(parts.values())} for parts in own
    ]
    rates = [len(ranks) * SAMPLES / step] * rounds
    return MeasuredRun([Rank(SAMPLES, parts, ("communication",)) for parts in waiting], rates)


def found(*more, **facts):
    """What is measured where each of two ranks has that much more in a step, and other facts."""
    ranks = more or ({}, {})
    largest = run(*ranks)
    larger = 4 * largest.slowest.compute / 1.1
    return Measurements([run(ranks[0]), largest], replace(HEALTHY, **{"larger": larger, **facts}))


def both(**more):
    return (more, more)


LOADS = {"loader": 2 * SAMPLES / 0.16}
PLANTED = {
    "slow loader": (
        found(*both(data=0.15), load=Sample(0.005, 0.005, 0.005), **LOADS),
        "the loader is slower",
        {"data.init_args.num_workers": 2},
    ),
    "slow disk": (
        found(*both(data=0.15), load=Sample(0.005, 0.0005, 0.005), **LOADS),
        "waits for storage",
        {"data.init_args.num_workers": 2},
    ),
    "interpreter's lock": (
        found(*both(data=0.15), load=Sample(0.005, 0.005, 0.01), **LOADS),
        "interpreter's lock",
        {"data.init_args.num_workers": 2},
    ),
    "slow rank": (
        found({}, {"forward": 0.03, "backward": 0.06}),
        "rank 1 is slower",
        {"trainer.strategy": "ddp_balanced"},
    ),
    "slow link": (found(*both(communication=0.3), link=0.32), "the link is slow", {"trainer.strategy": "ddp_bf16"}),
    "threads": (
        found(*both(forward=0.1, backward=0.2), threads=8, cores=2, with_fewer=2 * SAMPLES / STEP),
        "threads compete",
        {"ComputeSettings.threads": 1},
    ),
    "host reads": (
        found(*both(forward=0.05), accelerator=True, reads={"module.py:7": 1.0}, read_seconds=0.05),
        "makes the host wait",
        {},
    ),
    "callback": (found(*both(**{"callback Sleeper": 0.05})), "Sleeper takes long", {}),
    "small batches": (
        found(larger=1.2 * 0.094),
        "batches are small",
        {"data.init_args.batch_size": 4 * SAMPLES},
    ),
    "validation": (
        found(epoch=EpochCosts(100, 15.0, 0.1)),
        "validation takes long",
        {"trainer.check_val_every_n_epoch": 15},
    ),
    "logger": (
        found(*both(**{"logger HugeLogger": 0.05}), log_every=1),
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


def test_a_healthy_run_has_no_reason_and_says_how_near_it_is_to_its_limit():
    assert reasons(found()) == []
    lines = report.sentences(found(), [])
    assert any(line.startswith("No cause was found: training reaches 94% of the samples/s") for line in lines)


def test_every_rule_has_a_planted_cause_or_is_named_here():
    seen = {rule.__name__ for rule in RULES for planted, _, _ in PLANTED.values() if any(True for _ in rule(planted))}
    slow = found(*both(transfer=0.05), epoch=EpochCosts(100, 0.5, 5.0))
    assert {one.cause for one in reasons(slow)} == {
        "the transfer of batches to the device is slow",
        "checkpoints take long",
    }
    assert seen | {"checkpoints", "transfer"} == {rule.__name__ for rule in RULES}


def test_gains_are_what_is_left_without_the_cause():
    """With epochs of steps alone, a step without the cause; else all of an epoch."""
    sleeps = found(*both(**{"callback Sleeper": 0.05}), epoch=EpochCosts())
    assert reasons(sleeps)[0].gain == pytest.approx(0.15 / 0.1)
    balanced = reasons(found({}, {"forward": 0.03, "backward": 0.06}, epoch=EpochCosts()))[0]
    compute, slow = 0.094, 0.184
    step = 0.19
    assert balanced.gain == pytest.approx(step / (step - slow + 2 / (1 / compute + 1 / slow)))
    assert balanced.effect is Effect.ROUNDING


def test_loaders_that_compute_get_no_more_processes_than_cores():
    """What waits for storage may have more; where no core is free, another remedy is told."""
    busy = found(*both(data=0.15), load=Sample(0.005, 0.005, 0.005), cores=2, **LOADS)
    assert reasons(busy)[0].values == {}
    assert "shards" in reasons(busy)[0].remedy
    waits = found(*both(data=0.15), load=Sample(0.005, 0.0005, 0.005), cores=2, **LOADS)
    assert reasons(waits)[0].values == {"data.init_args.num_workers": 2}


def test_settings_that_a_configuration_does_not_have_are_not_written():
    own_data = found(*both(data=0.15), load=Sample(0.005, 0.005, 0.005), keys={}, **LOADS)
    assert reasons(own_data)[0].values == {}
    own_strategy = found({}, {"forward": 0.06, "backward": 0.06}, strategy="hybrid_pipeline")
    assert reasons(own_strategy)[0].values == {}


def test_stages_that_differ_are_no_slow_rank():
    slow = found({}, {"forward": 0.06, "backward": 0.06}, strategy="hybrid_pipeline")
    ranks = [replace(one, waiting=("communication", "receive")) for one in slow.largest.ranks]
    stages = replace(slow, runs=[slow.runs[0], replace(slow.largest, ranks=ranks)])
    assert "slower than the others" in reasons(slow)[0].cause
    assert reasons(stages) == []


def test_the_table_adds_up_and_names_weak_and_strong_scaling():
    slow = found({}, {"forward": 0.03, "backward": 0.06})
    kinds = report.by_kind(slow.largest)
    assert sum(kinds.values()) == pytest.approx(slow.largest.step)
    assert kinds[report.WAITS_FOR_OTHERS] == pytest.approx(0.045)
    assert "weak scaling" in report.sentences(slow, [])[0]
    halves = replace(
        slow, runs=[slow.runs[0], MeasuredRun([replace(one, samples=16) for one in slow.largest.ranks], [100.0])]
    )
    assert "each of 2 devices has 16 samples (strong scaling)" in report.sentences(halves, [])[0]
