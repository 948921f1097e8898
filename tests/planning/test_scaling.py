"""Tests of `scaling`: each planted cause is the first reason, with its remedy and gain; a healthy run has no reason."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.scaling import report
from cnnstrategies.planning.scaling.figures import EpochCosts, Facts, MeasuredRun, Measurements, Rank, Sample
from cnnstrategies.planning.scaling.reasons import RULES, WITHOUT_BUFFERS, reasons
from cnnstrategies.planning.scaling.timeline import (
    BARRIER,
    BATCH,
    BUFFERS,
    EXCHANGE,
    GRADIENTS,
    LOG,
    OTHERS,
    ROWS,
    SUMS,
    WAITING,
    Change,
    Segment,
    joined,
    predict,
)

pytestmark = pytest.mark.light

SAMPLES = 32
PARTS = {"data": 0.001, "transfer": 0.0005, "forward": 0.03, "backward": 0.06, "optimizer": 0.004, "other": 0.002}
EARLY = ("data", "transfer", "callback Early")  # Parts before DDP broadcasts the buffers.
COSTS = {GRADIENTS: 0.0025, BUFFERS: 0.0003, LOG: 0.0002, BARRIER: 0.0002, EXCHANGE: 0.0002, "": 0.0}
STEP = 0.1
STEPS, ROUNDS = 4, 5
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


def segments_of(parts, meets, uneven):
    """Return the segments of a step of one rank as pairs of work and kind of collective.

    Args:
        parts: Seconds of each part of the step.
        meets: Kinds of collectives in the middle of the forward.
        uneven: Seconds of the forward before and after these collectives.
    """
    early = {name: parts[name] for name in EARLY if name in parts}
    forward = {"forward": parts["forward"] / 2 + uneven[0]}
    late = {"forward": parts["forward"] / 2 + uneven[1], "backward": parts["backward"]}
    after = {name: parts[name] for name in parts if name not in (*EARLY, "forward", "backward")}
    middle = [({}, kind) for kind in meets[1:]]
    inside = (
        [(forward, meets[0]), *middle, (late, GRADIENTS)]
        if meets
        else [({**late, "forward": parts["forward"] + sum(uneven)}, GRADIENTS)]
    )
    return [(early, BUFFERS), *inside, (after, "")]


def simulated(ranks, steps, costs):
    """Return the timelines of ranks that wait for each other.

    Args:
        ranks: For each rank, its segments as pairs of work and kind of collective.
        steps: Number of steps.
        costs: Seconds of each kind of collective after the last rank has arrived.
    """
    timelines, clocks = [[] for _ in ranks], [0.0] * len(ranks)
    for segments in zip(*ranks, strict=True):
        clocks = [clock + sum(work.values()) for clock, (work, _) in zip(clocks, segments, strict=True)]
        kind = segments[0][1]
        leaves = [max(clocks) if kind else clock for clock in clocks]
        ends = [leave + costs[kind] for leave in leaves]
        for timeline, (work, _), clock, end in zip(timelines, segments, clocks, ends, strict=True):
            timeline.append(Segment(work, kind, end - clock))
        clocks = ends
    return timelines


def run(*ranks, meets=(), uneven=0.0, costs=(), noise=0.0):
    """Return a run whose ranks wait for each other in their collectives.

    Args:
        ranks: For each rank, the additional seconds of a step by part.
        meets: Kinds of collectives in the middle of the forward.
        uneven: Seconds of the forward that the ranks spend before these collectives in turns, and otherwise after them.
        costs: Seconds of each kind of collective that differ from `COSTS`.
        noise: Standard deviation of the factors of each part's time in each step.
    """
    numbers = random.Random(1)
    rounds = []
    for _ in range(ROUNDS):
        timelines = [[] for _ in ranks]
        for step in range(STEPS):
            for rank, extra in enumerate(ranks):
                parts = {**PARTS, **{name: PARTS.get(name, 0.0) + more for name, more in extra.items()}}
                parts = {name: seconds * max(0.5, numbers.gauss(1.0, noise)) for name, seconds in parts.items()}
                early = uneven * ((step + rank) % 2)
                timelines[rank] += segments_of(parts, meets, (early, uneven - early))
        # The time after the last collective of a step belongs to the first segment of the next step.
        merged = []
        for timeline in timelines:
            pending, kept = Counter(), []
            for work, kind in timeline:
                pending.update(work)
                if kind:
                    kept.append((dict(pending), kind))
                    pending = Counter()
            merged.append([*kept, (dict(pending), "")])
        rounds.append(simulated(merged, STEPS, {**COSTS, **dict(costs)}))
    measured = []
    for rank in range(len(ranks)):
        parts = Counter()
        for timelines in rounds:
            for segment in timelines[rank]:
                parts.update(segment.work)
                parts[WAITING + segment.collective] += segment.waited
        measured.append(Rank(SAMPLES, {name: seconds / STEPS / ROUNDS for name, seconds in parts.items()}))
    parts = [rank.parts for rank in measured]
    rates = [len(ranks) * SAMPLES / measured[0].step] * ROUNDS
    return MeasuredRun(measured, rates, [joined(STEPS, timelines, parts) for timelines in rounds])


def measurements(*more, meets=(), uneven=0.0, costs=(), noise=0.0, **facts):
    """Return the measurements of a run on two ranks.

    Args:
        more: For each rank, the additional seconds of a step by part.
        meets: As for `run`.
        uneven: As for `run`.
        costs: As for `run`.
        noise: As for `run`.
        facts: Facts that differ from the healthy run's facts.
    """
    ranks = more or ({}, {})
    largest = run(*ranks, meets=meets, uneven=uneven, costs=costs, noise=noise)
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
        measurements(costs={GRADIENTS: 0.3}, link=0.32),
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
    "callback on rank 0": (measurements({"callback Sleeper": 0.08}, {}), "Sleeper takes long", {}),
    "averaged weights by copies": (measurements(*both(**{"callback Average": 0.05})), "Average takes long", {}),
    "checkpoints on a slow disk": (measurements(epoch=EpochCosts(100, 0.5, 5.0)), "checkpoints take long", {}),
    "slow disk of rank 1": (
        measurements({}, {"data": 0.15}, load=Sample(0.005, 0.0005, 0.005), loader=2 * SAMPLES / 0.16),
        "the loader waits for storage on rank 1",
        {"data.init_args.num_workers": 2},
    ),
    "slow rank with a log in each step": (
        measurements({}, {"forward": 0.2, "backward": 0.1}, meets=(LOG,)),
        "rank 1 is slower",
        {"trainer.strategy": "ddp_balanced"},
    ),
    "large buffers": (
        measurements(costs={BUFFERS: 0.05}),
        "DDP broadcasts the buffers",
        WITHOUT_BUFFERS,
    ),
    "barrier": (measurements(meets=(BARRIER,), uneven=0.06), "a barrier", {}),
    "log in each step": (measurements(meets=(LOG, LOG), uneven=0.06), "sync_dist=True", {}),
    "many logs": (measurements(meets=(LOG,) * 40, costs={LOG: 0.001}), "sync_dist=True", {}),
    "exchange in each step": (measurements(meets=(EXCHANGE,), uneven=0.06), "exchanges values", {}),
    "barrier and log": (measurements(meets=(BARRIER, LOG), uneven=0.06), "several collectives", {}),
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
def test_a_planted_cause_is_the_only_one_and_has_its_remedy(name):
    planted, cause, values = PLANTED[name]
    first, *others = reasons(planted) or [None]
    assert first is not None
    assert others == []
    assert cause in first.cause
    assert first.values == values
    assert first.gain > 1.2
    lines = "\n".join(report.sentences(planted, [first]))
    assert first.remedy in lines
    assert f"{first.gain:.2f} times" in lines


@pytest.mark.parametrize("name", PLANTED)
def test_the_prediction_without_a_change_is_the_measured_time(name):
    planted, _, _ = PLANTED[name]
    for each, rate in zip(planted.largest.rounds, planted.largest.rates, strict=True):
        assert each.seconds == pytest.approx(each.steps * planted.largest.samples / rate, rel=0.02)


@pytest.mark.parametrize("meets", [(), (LOG,), (BARRIER, LOG)])
def test_noise_is_not_a_cause(meets):
    """Each part's time varies by 10 % from step to step."""
    assert reasons(measurements(meets=meets, noise=0.1)) == []


def test_a_cause_that_only_some_rounds_show_is_not_named():
    slow, healthy = measurements(*both(**{"callback Sleeper": 0.05})), measurements()
    rounds = [*slow.largest.rounds[:3], *healthy.largest.rounds[3:]]
    mixed = replace(slow, runs=[slow.runs[0], replace(slow.largest, rounds=rounds)])
    assert reasons(slow) != []
    assert reasons(mixed) == []


def test_two_causes_are_both_named():
    both_ranks = measurements({"callback Sleeper": 0.05}, {"callback Sleeper": 0.05}, meets=(LOG,), uneven=0.06)
    assert [reason.cause for reason in reasons(both_ranks)] == [
        "logging with `sync_dist=True` makes the ranks wait for each other",
        "Sleeper takes long",
    ]
    # The other rank is as slow for another reason, so removing the callback alone would gain nothing.
    hidden = measurements({"callback Sleeper": 0.15}, {"data": 0.15})
    assert reasons(hidden) == []


def test_ranks_with_different_collectives_are_compared_by_their_whole_steps():
    parts = [{"forward": 0.2, WAITING + "receive": 0.1}, {"forward": 0.1, WAITING + "send": 0.2}]
    timelines = [[Segment({"forward": 0.4}, EXCHANGE)], [Segment({"forward": 0.2}, LOG)]]
    whole = joined(2, timelines, parts)
    assert [[segment.collective for segment in timeline] for timeline in whole.ranks] == [[OTHERS], [OTHERS]]
    assert predict(whole.ranks, Change()) == pytest.approx(0.6)
    assert predict(whole.ranks, Change({(0, "forward"): 0.25})) == pytest.approx(0.4)


def test_a_healthy_run_has_no_reason_and_reports_its_distance_from_the_limit():
    assert reasons(measurements()) == []
    lines = report.sentences(measurements(), [])
    assert any(line.startswith("No cause was found: training reaches 94% of the samples/s") for line in lines)


def test_every_rule_finds_its_planted_cause():
    seen = {rule.__name__ for rule in RULES for planted, _, _ in PLANTED.values() if any(True for _ in rule(planted))}
    slow = measurements(*both(transfer=0.05))
    assert [reason.cause for reason in reasons(slow)] == ["the transfer of batches to the device is slow"]
    assert seen | {"transfer", "image_parts"} == {rule.__name__ for rule in RULES}  # The latter has a test of its own.


def test_a_gain_is_the_speedup_of_removing_the_cause():
    """If epochs consist of steps only, the gain of a remedy is the gain in the time of a step."""
    sleeps = measurements(*both(**{"callback Sleeper": 0.05}), epoch=EpochCosts())
    step = sleeps.largest.step
    assert reasons(sleeps)[0].gain == pytest.approx(step / (step - 0.05), rel=1e-3)
    slow_rank = measurements({}, {"forward": 0.03, "backward": 0.06}, epoch=EpochCosts())
    step, compute, slow = slow_rank.largest.step, 0.09, 0.18
    balanced = reasons(slow_rank)[0]
    assert balanced.gain == pytest.approx(step / (step - slow + 2 / (1 / compute + 1 / slow)), rel=1e-2)
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
    ranks = [replace(rank, parts={**rank.parts, WAITING + "receive": 0.0}) for rank in slow.largest.ranks]
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
        slow, runs=[slow.runs[0], MeasuredRun([replace(rank, samples=16) for rank in slow.largest.ranks], [100.0], [])]
    )
    assert "each of 2 devices has 16 samples (strong scaling)" in report.sentences(halves, [])[0]
    single = [MeasuredRun([replace(rank, samples=1) for rank in run.ranks], [100.0], []) for run in slow.runs]
    sentence, *_ = report.sentences(replace(slow, runs=single), [])
    assert sentence == "Each device has 1 sample, so a step has 1 sample on 1 and 2 samples on 2 (weak scaling)."


def divided(computing, rows, sums, loading=0.0):
    """Return a run in which each rank has a part of the same two images.

    Args:
        computing: Seconds of the forward and backward of each rank.
        rows: Seconds that the rank that computes longest waits for rows of other ranks.
        sums: The same for sums over the parts.
        loading: Seconds in which rank 0 loads a batch.
    """
    ranks = []
    for rank, seconds in enumerate(computing):
        parts = {"forward": seconds / 3, "backward": 2 * seconds / 3, "data": loading * (rank == 0)}
        parts |= {
            WAITING + ROWS: rows + max(computing) - seconds,
            WAITING + SUMS: sums,
            WAITING + BATCH: loading * (rank > 0),
        }
        ranks.append(Rank(2 / len(computing), parts))
    rounds = [joined(1, [[Segment({}, ROWS)], [Segment({}, SUMS)]], [rank.parts for rank in ranks])] * ROUNDS
    return MeasuredRun(ranks, [2 / ranks[0].step] * ROUNDS, rounds)


def test_waits_of_parts_of_images_are_listed_and_add_up_to_the_step():
    measured = divided((0.3, 0.2), rows=0.06, sums=0.04, loading=0.1)
    kinds = {kind: seconds for kind, seconds in report.by_kind(measured).items() if seconds > 1e-9}
    assert kinds == pytest.approx({
        "waiting for data": 0.05, "waiting for the batch": 0.05, "forward": 0.25 / 3, "backward": 0.5 / 3,
        "rows of other devices": 0.06, "sums over the parts": 0.04, "waiting for the slowest": 0.05,
    })  # fmt: skip
    assert sum(kinds.values()) == pytest.approx(measured.step)
    assert measured.samples == 2


def test_messages_and_unequal_parts_of_images_are_causes():
    facts = Facts("spatial", cores=8)
    causes = {reason.cause: reason for reason in reasons(Measurements([divided((0.3, 0.2), 0.06, 0.04, 0.1)], facts))}
    assert [*causes] == [
        "the loader is slower than the network on rank 0",
        "devices wait for rows of other devices",
        "rank 0 computes longer than the other ranks",
        "devices wait for sums over the parts, of gradients and of statistics",
    ]
    assert causes["devices wait for rows of other devices"].gain == pytest.approx(0.5 / 0.44)
    assert causes["rank 0 computes longer than the other ranks"].gain == pytest.approx(0.5 / 0.45)
    assert causes["the loader is slower than the network on rank 0"].gain == pytest.approx(0.5 / 0.4)
    assert "ddp_balanced" not in causes["rank 0 computes longer than the other ranks"].remedy
    assert reasons(Measurements([divided((0.3, 0.3), 0.001, 0.001)], facts)) == []
