"""Tests of the ranking of strategies: predicted times against times by hand, groups of strategies, and the overlay."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.planning.candidates import Candidate, Effect, Job
from cnnstrategies.planning.cluster import Cluster, Host
from cnnstrategies.planning.costs import Link, Profile
from cnnstrategies.planning.parameter_server import ParameterServer, mean_value_analysis
from cnnstrategies.planning.rank import Ranking, data_parallel, rank
from cnnstrategies.planning.report import write_overlay
from tests.planning.random_graphs import chain

pytestmark = pytest.mark.light

SLOW, FAST = Link(1e8, 5e-5), Link(1e10, 1e-5)
VGG = [10**5, 10**5, 10**5, 10**8]


def job(parameters: list[int], samples: int = 64, batch_norm: bool = False) -> Job:
    """Return a job on four machines with a network of four nodes.

    Three nodes take 10 ms forward for 8 samples, the last node 1 ms. With VGG's parameters, the last node has nearly
    all parameters.
    """
    costs = chain([0.03, 0.03, 0.03, 0.003], sent=4000, parameters=parameters, saved=5000, samples=8, input_bytes=700)
    cluster = Cluster((Host(1, SLOW, SLOW, price=1.0),) * 4)
    return Job(Profile(costs, ((0.0001, 0.0001),) * 4, batch_norm), cluster, samples)


def server(job: Job) -> Candidate:
    """Return the synchronous candidate of the parameter server."""
    return next(ParameterServer(job).candidates())


def families(ranking: Ranking) -> list[str]:
    return [row.family for row in ranking.same]


def test_ddps_step_is_the_computation_before_the_first_bucket_plus_its_reduction() -> None:
    by_name = {candidate.family: candidate for candidate in data_parallel(job([400] * 3 + [10**8]))}
    ring = 2 * 3 * (5e-5 + 1e8 / 4 / 1e8)
    ddp = by_name["ddp"]
    # The last node's gradients are ready first, after all forwards and the last node's backward.
    before = 2 * 0.031 - 4 * 0.0001 + 2 * 0.002 - 0.0001
    assert ddp.step == pytest.approx(before + ring, rel=0.01)
    assert ddp.bottleneck == "nic"
    assert ddp.sent_bytes == pytest.approx(2 * 3 * (1e8 + 1200))
    assert by_name["ddp_bf16"].step == pytest.approx(before + ring / 2, rel=0.01)


def test_ddp_wins_with_few_parameters_and_a_pipeline_with_a_large_last_layer() -> None:
    assert families(rank(job([100] * 4)))[0] == "ddp"
    tied, beyond = (rank(job([100, 100, 100, size])) for size in (2 * 10**5, 5 * 10**5))
    assert families(tied)[:2] == ["ddp", "parameter_server"]
    assert any("ddp is first although parameter_server gains 1" in note for note in tied.notes)
    assert families(beyond)[0] == "parameter_server", "the gain is larger than a tie"
    ranking = rank(job(VGG))
    assert families(ranking)[0] == "hybrid"
    assert ranking.best.options["replicas"] == [3, 1]
    assert str(ranking.best).startswith("hybrid [3, 1], M=")
    assert ranking.price(ranking.best) == pytest.approx(4 / 3600 * 1e6 / ranking.rate(ranking.best))


def test_strategies_that_change_learning_are_ranked_separately() -> None:
    ranking = rank(job(VGG))
    assert {row.effect for row in ranking.same} <= {Effect.NONE, Effect.ROUNDING}
    assert {row.effect for row in ranking.changing} == {Effect.LEARNING}
    assert "ddp_powersgd" in [row.family for row in ranking.changing]
    normalised = rank(job(VGG, batch_norm=True))
    assert "hybrid" not in families(normalised), "microbatches change BatchNorm's statistics"
    assert "hybrid" in [row.family for row in normalised.changing]


def test_a_steps_time_is_the_time_of_the_device_with_most_samples() -> None:
    for samples, most in ((64, 16), (63, 16), (65, 17)):
        ddp = next(data_parallel(job([0] * 4, samples)))
        assert ddp.step == pytest.approx(most / 8 * (0.093 - 8 * 0.0001) + 8 * 0.0001)
    assert not list(data_parallel(job([0] * 4, samples=3))), "one device would have no sample"


def unequal(parameters: list[int], samples: int = 80, **changes: Any) -> Job:
    """Return a job on two devices; the second device takes four times as long."""
    made = job(parameters, samples)
    profile = replace(made.profile, fixed=())
    cluster = Cluster((Host(1, FAST, FAST), Host(1, FAST, FAST, speed=0.25)))
    return replace(made, profile=profile, cluster=cluster, **changes)


def test_unequal_shares_gain_the_time_worked_out_by_hand(tmp_path: Path) -> None:
    """In times of one sample on the fast device, shares of 40 and 40 samples take 160, shares of 64 and 16 take 64."""
    ranking = rank(unequal([0] * 4))
    rows = {row.family: row for row in ranking.same}
    equal, dealt, server = (rows[name] for name in ("ddp", "ddp_balanced", "parameter_server"))
    assert ranking.best is dealt
    assert dealt.options["initial_shares"] == server.options["initial_shares"] == [64, 16]
    assert server.options["shares"] == "auto"
    assert server.step == pytest.approx(dealt.step)
    assert (equal.step, dealt.step) == pytest.approx((160 * 0.093 / 8, 64 * 0.093 / 8))
    assert "ddp_balanced: the devices get 64, 16 samples of a step" in ranking.notes
    file = tmp_path / "strategy.yaml"
    write_overlay(file, ranking)
    strategy = yaml.safe_load(file.read_text())["trainer"]["strategy"]
    assert strategy == {
        "class_path": "cnnstrategies.strategies.BalancedDDPStrategy",
        "init_args": {"initial_shares": [64, 16]},
    }


def test_unequal_shares_are_proposed_if_they_gain_and_fit_into_memory() -> None:
    def dealt(made: Job) -> list[int] | None:
        proposals = [row.options["initial_shares"] for row in data_parallel(made) if row.family == "ddp_balanced"]
        return proposals[0] if proposals else None

    assert dealt(unequal([0] * 4)) == [64, 16]
    of_samples = next(data_parallel(unequal([0] * 4))).memory / 40
    assert dealt(unequal([0] * 4, memory_limit=round(of_samples * 50))) == [50, 30]
    assert dealt(unequal([10**11] * 4)) is None, "summing the gradients takes most of a step"
    assert dealt(job([0] * 4)) is None, "equal devices"
    waits = unequal([0] * 4)
    fixed = replace(waits.profile, fixed=((0.009, 0.019),) * 3 + ((0.0005, 0.0015),))
    assert dealt(replace(waits, profile=fixed, samples=16)) == [15, 1], "most of the time does not depend on samples"
    normalised = replace(waits, profile=replace(waits.profile, batch_norm=True), samples=30)
    assert dealt(normalised) == [22, 8]
    ranking = rank(normalised)
    assert families(ranking) == ["ddp", "parameter_server"], "only equal shares keep BatchNorm's statistics"
    assert {"ddp_balanced", "parameter_server"} <= {row.family for row in ranking.changing}


def test_strategies_that_do_not_fit_into_memory_are_left_out_with_a_note() -> None:
    tight = replace(job(VGG), memory_limit=4 * 10**8 - 1, state_copies=4)
    with pytest.raises(ConfigurationError, match="no strategy fits into the devices"):
        rank(replace(tight, memory_limit=1000))
    whole = next(data_parallel(job(VGG))).memory
    ranking = rank(replace(job(VGG), memory_limit=whole - 1))
    assert "ddp" not in [row.family for row in ranking.same if not row.options]
    assert any(note.startswith("ddp: needs") for note in ranking.notes)


def test_a_synchronous_server_hides_transfers_up_to_its_bottleneck() -> None:
    quick = server(job([100] * 4))
    compute = 16 / 8 * 0.093 - 8 * 0.0001
    assert quick.step == pytest.approx(compute, rel=0.05)
    pairs = replace(job(VGG), cluster=Cluster((Host(2, SLOW, FAST),) * 2))
    made = server(pairs)
    # The two workers of a machine send half of their gradients to the other machine's server, and the machine's server
    # sends as much to the other machine's workers.
    assert made.step >= 2 * 1e8 * 2 * 0.5 / 1e8
    assert made.bottleneck == "nic"
    busy = replace(pairs, cluster=replace(pairs.cluster, server_message=1.0))
    # Messages are the gradients of each layer in the backward and the new values in the forward; those of the last
    # layer have 24 parts.
    assert server(busy).step >= 2 * (3 + 24)
    slow = replace(pairs, cluster=replace(pairs.cluster, server_rate=1e7))
    assert server(slow).bottleneck == "server"


def test_mean_value_analysis_of_known_networks() -> None:
    assert mean_value_analysis(3.0, [1.0], 1) == pytest.approx(1 / 4)
    assert mean_value_analysis(0.0, [1.0, 1.0], 3) == pytest.approx(3 / 4), "n / (n + k - 1) for k equal queues"
    assert mean_value_analysis(1.0, [0.5], 100) == pytest.approx(2.0, rel=1e-3), "the queue's own rate"


def test_async_does_not_wait_for_a_slow_worker_and_ssp_does() -> None:
    _, dealt, free, capped = ParameterServer(unequal([100] * 4)).candidates()
    assert free.step == pytest.approx(dealt.step, rel=0.05), "shares that fit the slow worker make it wait for nobody"
    assert capped.step == pytest.approx(2.5 * dealt.step, rel=0.05)


def test_the_best_strategy_is_written_as_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "strategy.yaml"
    write_overlay(file, rank(job(VGG)))
    written = yaml.safe_load(file.read_text())
    assert written["trainer"]["devices"] == 1
    assert written["trainer"]["num_nodes"] == 4
    options = written["trainer"]["strategy"]["init_args"]
    assert (options["replicas"], options["cuts"]) == ([3, 1], ["n2"])
    hosts = tuple(Host(1, SLOW, SLOW, speed=speed) for speed in (1.0, 1.0, 0.5, 1.0))
    write_overlay(file, rank(replace(job(VGG), cluster=Cluster(hosts), microbatches=10)))
    options = yaml.safe_load(file.read_text())["trainer"]["strategy"]["init_args"]
    assert (options["shares"], options["initial_shares"], options["placement"]) == ("auto", [4, 4, 2, 10], "stages")
    uneven = Cluster((Host(3, SLOW, SLOW), Host(1, SLOW, SLOW)))
    write_overlay(file, rank(replace(job([100] * 4), cluster=uneven)))
    assert "The machines have 3, 1 devices" in file.read_text()
    assert "devices" not in yaml.safe_load(file.read_text())["trainer"]
    write_overlay(file, rank(job([100] * 4)))
    assert yaml.safe_load(file.read_text())["trainer"]["strategy"] == "ddp"
