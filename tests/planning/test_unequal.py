"""Tests of plans for devices with unequal memories: the text that describes devices, the searches, and the tables."""

import io
import itertools
import random
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.planning.candidates import Candidate, Effect, Job
from cnnstrategies.planning.cluster import Cluster, read_cluster
from cnnstrategies.planning.costs import Link, Profile
from cnnstrategies.planning.device_order import largest_in_best_order, orders, rank_in_best_order
from cnnstrategies.planning.device_report import best_plans, limits, plans_report
from cnnstrategies.planning.devices import Device, described, read_devices
from cnnstrategies.planning.hybrid import hybrids
from cnnstrategies.planning.largest_batch import largest_of
from cnnstrategies.planning.lighter import lighter_replicas, lighter_stages
from cnnstrategies.planning.memory import OptimizerMemory, replica_peak
from cnnstrategies.planning.predict import choose_layout
from cnnstrategies.planning.rank import NothingFitsError, Ranking, data_parallel, rank
from cnnstrategies.planning.recompute import RECOMPUTED
from cnnstrategies.planning.report import trainer_section
from tests.planning.random_graphs import best_of_all, chain, predictor, random_question, with_unequal_memories

pytestmark = pytest.mark.light

LINK = Link(1e10, 1e-5)
GIB = 2**30


ACCUMULATES = {"accumulate_grad_batches"}


def job(*devices: Device, samples: int = 60, parameters: int = 1000, saved: int = 8000) -> Job:
    """Return a job with four equal nodes. Each sample has ``saved / 2`` bytes of activations and 100 of images."""
    costs = chain([0.03] * 4, sent=400, parameters=[parameters] * 4, saved=saved, samples=8, input_bytes=800)
    cluster = Cluster.connected(devices, LINK)
    return Job(Profile(costs), cluster, samples, activation_checkpointing=None, state_copies=4)


def room(samples: int) -> int:
    """Return the bytes that a device needs for a number of samples under DDP, and a little more."""
    return replica_peak(job(Device(), Device()).profile.at(samples), OptimizerMemory(2), buckets=1.0).total + 50


def by_family(made: Job) -> dict[str, Candidate]:
    rows = [row for row in data_parallel(made) if not made.excess(row.memories)]
    return {row.family: row for row in sorted(rows, key=lambda row: -row.step)}


def test_a_text_describes_devices() -> None:
    text = "1x24GiB@1.0, 2 x 8GiB @ 0.4,1x512MiB"
    devices = (Device(1.0, 24 * GIB), *[Device(0.4, 8 * GIB)] * 2, Device(1.0, 2**29))
    assert read_devices(text, "have") == devices
    assert described(devices) == "1x24GiB@1, 2x8GiB@0.4, 1x512MiB@1"
    assert read_devices(described(devices), "have") == devices
    assert described([Device(1.0, 24 * GIB - 1)]) == "1x23.9GiB@1", "a memory is never rounded up"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("24GiB", "have='24GiB': '24GiB' is not a group of devices: write NUMBERxMEMORY@SPEED"),
        ("1x24GiB, ", "'' is not a group of devices"),
        ("2x@0.4", "'2x@0.4' is not a group of devices"),
        ("0x8GiB", "'0x8GiB' has no device: write a number of at least 1"),
        ("1x8G", "could be a power of 1024 or of 1000: write 8GiB or 8GB"),
        ("1x8GiB@fast", "the speed 'fast' is not a number above 0"),
        ("1x8GiB@0", "the speed '0' is not a number above 0"),
        ("1x8GiB@nan", "the speed 'nan' is not a number above 0"),
    ],
)
def test_a_wrong_text_is_refused_with_the_remedy(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        read_devices(text, "have")
    assert message in str(error.value)


def test_a_machine_of_a_cluster_file_may_have_unequal_devices(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    node = "nodes: [{{devices: {}, inside: {{gbit: 80}}, interconnect: {{gbit: 1}}{}}}, {{interconnect: {{gbit: 1}}}}]"
    file.write_text(node.format("'1x24GiB, 2x8GiB@0.4'", ""))
    cluster = read_cluster(file)
    assert cluster.speeds == (1.0, 0.4, 0.4, 1.0)
    assert cluster.memories == (24 * GIB, 8 * GIB, 8 * GIB, inf)
    assert cluster.host_of == (0, 0, 0, 1)
    for devices, more, message in (
        ("'1x24GiB'", ", memory: 8GiB", "memory: devices already gives each device its memory"),
        ("'1y24GiB'", "", "'1y24GiB' is not a group of devices"),
    ):
        file.write_text(node.format(devices, more))
        with pytest.raises(ConfigurationError, match=message):
            read_cluster(file)


def test_the_search_keeps_each_devices_limit_and_is_close_to_brute_force() -> None:
    """Brute force tries all layouts with all numbers of microbatches of each device."""
    rng = random.Random(61)
    over, fitting = [], 0
    for _ in range(40):
        question = random_question(rng)
        while question.job.cluster.devices * question.problem.microbatches > 18 or question.job.replicas is not None:
            question = random_question(rng)
        planner = with_unequal_memories(question, rng)
        best, layout = best_of_all(planner), planner.search()
        assert layout is not None
        time = planner.time(layout)
        assert (time == inf) == (best == inf), "the search must find a layout that fits if there is one"
        if best < inf:
            assert planner.job.excess(planner.device_memory(layout, planner.job.run_ahead or False)) == 0
            over.append(time / best)
            fitting += 1
    assert max(over) <= 1.15
    assert sum(ratio <= 1.05 for ratio in over) >= 0.9 * fitting > 5


def test_a_small_device_gets_the_stage_that_fits_and_fewer_microbatches() -> None:
    """The memory of the fullest device would suffice for equal limits, but here each device has its own."""
    costs = chain([1.0] * 4, parameters=[0, 0, 0, 1000], saved=100, samples=1)
    large, small = Device(memory=10**6), Device(memory=2000)
    planned = predictor(costs, Cluster.connected([large, small], LINK), 2, 4, stages=2)
    turned = predictor(costs, Cluster.connected([small, large], LINK), 2, 4, stages=2)
    assert planned.time(planned.search()) == inf, "the last stage has 3000 bytes of state, and device 1 has 2000"
    layout = turned.search()
    assert layout is not None
    assert turned.time(layout) < inf
    # Without limits, two equal replicas would each run 4 of 8 microbatches, and hold 3 of them at once.
    costs = chain([1.0] * 2, saved=1000, samples=1)
    three = [Device(memory=10**6), Device(memory=2500), Device(memory=10**6)]
    limited = predictor(costs, Cluster.connected(three, Link(1e12, 0)), 3, 8, replicas=(2, 1), schedule="gpipe")
    layout = limited.search()
    assert layout is not None
    assert limited.problem.shares(layout) == (6, 2, 8)
    assert limited.device_memory(layout, False) == [6001, 2001, 8008] or limited.time(layout) < inf


def test_more_microbatches_are_tried_if_no_layout_fits_otherwise() -> None:
    """With 1F1B a device holds fewer samples at once if a batch has more microbatches."""
    roomy = Device(memory=10**9)
    made = job(roomy, roomy, samples=256)
    least = min(row.memory for row in hybrids(made))
    tight = Device(memory=least // 4)
    (row, *_) = hybrids(job(tight, tight, samples=256))
    assert row.memory <= least // 4
    assert row.options["microbatches"] > max(other.options["microbatches"] for other in hybrids(made))


def test_shares_and_accumulation_keep_each_devices_limit() -> None:
    equal = by_family(job(Device(memory=room(30)), Device(memory=room(30))))
    assert "ddp_balanced" not in equal
    assert equal["ddp"].options == {}
    rows = by_family(job(Device(memory=room(50)), Device(memory=room(10))))
    assert "ddp_balanced" in rows, "equal shares do not fit, others do"
    assert [load.units for load in rows["ddp_balanced"].loads] == [50, 10]
    assert rows["ddp_balanced"].options["max_samples"] == [50, 10]
    assert rows["ddp"].options == {"accumulate_grad_batches": 4}, "10 samples fit on the smaller device, 15 do not"
    rows = by_family(job(Device(memory=room(20)), Device(memory=room(8), speed=0.5)))
    options = rows["ddp_balanced"].options
    assert options["accumulate_grad_batches"] == 4, "28 samples fit at once, and not half of 60"
    assert sum(options["initial_shares"]) == 15


def test_nothing_fits_names_the_device_and_the_missing_memory() -> None:
    made = job(Device(memory=10**6), Device(memory=1000), samples=60)
    with pytest.raises(NothingFitsError) as error:
        rank(made)
    text = str(error.value)
    assert "comes closest, and needs" in text
    assert "on rank 1, whose device has 1.0 KiB" in text
    assert "too much on rank 1; use a smaller batch, a device with more memory there, or more devices" in text


def test_ranks_use_the_devices_in_the_order_that_fits_best() -> None:
    """The last stage has 3000 bytes of state, and only device 0 has room for it."""
    costs = chain([1.0] * 4, parameters=[0, 0, 0, 1000], saved=100, samples=8)
    cluster = Cluster.connected([Device(memory=10**6), Device(memory=2000)], LINK)
    made = Job(Profile(costs), cluster, 8, state_copies=3, stages=2)
    ranking = rank_in_best_order(made)
    assert ranking.order == (1, 0)
    assert ranking.best.family == "hybrid"
    assert [ranking.device_of(rank) for rank in (0, 1)] == [1, 0]
    with pytest.raises(NothingFitsError):
        rank_in_best_order(replace(made, replicas=(1, 1)))
    assert largest_of(made, ["hybrid"], 500) is None
    best = largest_in_best_order(made, ["hybrid"], 500)
    assert best is not None
    largest, ordered, order = best
    assert order == (1, 0)
    again = largest_of(ordered, ["hybrid"], 500)
    assert again is not None
    assert again.samples == largest.samples
    roomy = replace(made, cluster=Cluster.connected([Device(memory=10**6), Device(memory=10**6, speed=0.5)], LINK))
    kept = largest_in_best_order(roomy, ["hybrid"], 500)
    assert kept is not None
    assert kept[2] == (0, 1), "the given order is kept if no other one allows a larger batch"
    equal = Device()
    assert list(orders([equal] * 3)) == [(0, 1, 2)]
    assert list(orders([equal, Device(0.5), Device(0.5)])) == [(0, 1, 2), (1, 2, 0)]
    assert len(list(orders([Device(speed) for speed in (1.0, 2.0, 3.0, 4.0)]))) == 6


def test_a_plan_writes_each_ranks_limit() -> None:
    def written(*devices: Device) -> dict[str, Any]:
        made = job(*devices, parameters=10**6)
        (row, *_) = hybrids(made)
        section, _ = trainer_section(Ranking(made, (row,), (), ()), row)
        options: dict[str, Any] = section["strategy"]["init_args"]
        return options

    large, small = Device(memory=10**9), Device(memory=5 * 10**8)
    options = written(large, small)
    assert (options["memory_limit"], options["placement"]) == ([10**9, 5 * 10**8], "stages")
    assert written(large, large)["memory_limit"] == 10**9
    assert "memory_limit" not in written(large, Device())


def test_another_precision_changes_learning_and_is_written(tmp_path: Path) -> None:
    made = job(Device(), Device())
    assert rank(made).same
    changed = rank(replace(made, precision="bf16-mixed"))
    assert not changed.same
    assert {row.effect for row in changed.changing} == {Effect.LEARNING}
    assert any("all plans have trainer.precision bf16-mixed" in note for note in changed.notes)
    assert trainer_section(changed, changed.best)[0]["precision"] == "bf16-mixed"
    assert "precision" not in trainer_section(rank(made), rank(made).best)[0]


def test_the_largest_batch_is_the_largest_that_fits() -> None:
    made = job(Device(memory=room(40)), Device(memory=room(18), speed=0.5))
    balanced = next(row for row in data_parallel(replace(made, samples=40 + 18)) if row.family == "ddp_balanced")
    assert not made.excess(balanced.memories)
    recomputed = largest_of(made, ["ddp"], 500)
    assert recomputed is not None
    assert recomputed.samples > 2 * 18 + 1, "more samples fit if activations are recomputed"
    assert recomputed.row.options == {RECOMPUTED: "except_last"}
    one_more = replace(made, samples=recomputed.samples + 1)
    assert all(
        one_more.excess(row.memories)
        for row in data_parallel(one_more)
        if row.family == "ddp" and not ACCUMULATES & {*row.options}
    )
    server = largest_of(made, ["parameter_server"], 500)
    assert server is not None
    assert server.samples > 40 + 18, "the servers keep the optimizer's state"
    pipeline = largest_of(made, ["hybrid"], 500)
    assert pipeline is not None
    assert pipeline.samples == 500, "with more microbatches, a pipeline holds no more samples at once"
    few = largest_of(made, ["ddp"], 5)
    assert few is not None
    assert few.samples == 5, "there are only 5 training samples"
    assert largest_of(job(Device(memory=100), Device(memory=100)), ["ddp", "hybrid"], 500) is None


def test_lighter_plans_need_less_memory_than_the_run() -> None:
    made = replace(job(Device(), Device()), microbatches=4, stages=2)
    layout, predictor = choose_layout(made)
    peak_of_run = max(peak.total for peak in predictor.stage_peaks(layout, predictor.runs_ahead(layout)))
    plans = {
        settings: max(peak.total for peak in of.stage_peaks(other, of.runs_ahead(other)))
        for settings, of, other in lighter_stages(predictor, layout)
    }
    assert len(plans) > 4
    assert all(settings.startswith("--trainer.strategy.init_args.") for settings in plans)
    assert plans["--trainer.strategy.init_args.microbatches=8"] < peak_of_run
    assert plans["--trainer.strategy.init_args.activation_checkpointing=always"] < peak_of_run
    replicas = list(lighter_replicas(made.profile, 16, OptimizerMemory(), 2, 0.0, recomputes=False))
    peak = replica_peak(made.profile.at(16), OptimizerMemory(), 2).total
    assert all(plan.peaks[0].total < peak for plan in replicas)
    texts = [plan.settings for plan in replicas]
    assert texts[0] == "--trainer.callbacks+=ActivationCheckpointing"
    assert texts[1] == "--trainer.accumulate_grad_batches=4 with a rank's batch of 8 samples instead of 16"
    assert texts[-1].startswith(f"{texts[0]} --trainer.accumulate_grad_batches=32 with a rank's batch of 1 samples")
    again = lighter_replicas(made.profile, 3, OptimizerMemory(), 1, 0.0, recomputes=True)
    assert [plan.settings for plan in again] == [
        "--trainer.accumulate_grad_batches=2 with a rank's batch of 2 samples instead of 3"
    ]


def test_the_table_shows_what_limits_each_device() -> None:
    made = job(Device(memory=10**6), Device(memory=room(10), speed=0.5), Device(memory=10**6, speed=0.5))
    ranking = rank(made)
    output = io.StringIO()
    Console(file=output, width=80).print(plans_report(ranking))
    text = output.getvalue()
    assert "…" not in text
    assert len(best_plans(ranking)) == 3
    assert [line[0] for line in text.splitlines() if line[1:3] == ". "] == ["1", "2", "3"]
    (balanced,) = [row for row in (*ranking.same, *ranking.changing) if row.family == "ddp_balanced"]
    assert balanced.options["initial_shares"][1] == 10
    assert list(limits(ranking, balanced)) == ["compute", "memory", "compute"]
    (equal,) = [row for row in (*ranking.same, *ranking.changing) if row.family == "ddp"]
    assert next(limits(ranking, equal)) == "wait for rank 1"
    numbers = [row.step for row in best_plans(ranking) if row.effect < 2]
    assert all(before <= after * 1.03 for before, after in itertools.pairwise(numbers))
