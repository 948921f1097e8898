"""Deep Gradient Compression: workers make the momentum, forget it where they send, and send less step by step."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_apart
from roles import PlainRoles, Roles
from test_sync import shares_of, train
from torch import Tensor, nn
from training import SGD, batches, make_network, specify, train_alone

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.compression import Encoder, decode
from cnnstrategies.paramserver.slicing import cut
from cnnstrategies.paramserver.specification import Specification, hyperparameters
from cnnstrategies.paramserver.worker.momentum import MomentumCorrection, share

NESTEROV = SGD | {"nesterov": True, "groups": True}
GRADIENT = torch.tensor([4.0, 2.0, 1.0, 0.0])
CORRECTED = {"compression": "topk", "compression_ratio": 0.25, "momentum_correction": True}


class Sender:
    """A worker with one parameter of four elements, and what it sends of a gradient."""

    def __init__(self, options: dict[str, Any], value: float = 0.0, **sgd: Any) -> None:
        self.values = torch.full((4,), value)
        parameter = nn.Parameter(self.values)
        optimizer = torch.optim.SGD([parameter], **{"lr": 1.0, "momentum": 0.5} | sgd)
        specification = Specification.of([("w", parameter)], optimizer, 1, **options)
        self.encoder = Encoder(specification.compression, specification.compression_ratio)
        self._slice = cut(specification)[0]
        self._correction = MomentumCorrection(specification, [self._slice], [parameter])
        self.served = self._correction.begin(hyperparameters(optimizer))

    def send(self, gradient: Tensor = GRADIENT) -> list[float]:
        payload = memoryview(self._correction.encode(self.encoder, self._slice, gradient)).cast("B")
        return decode(payload, self.encoder.encoding, 4, torch.float32).tolist()


@pytest.mark.light
def test_the_largest_velocity_is_sent_and_forgotten() -> None:
    """With momentum 0.5 and one of four elements: u = u / 2 + g, v += u, both by hand.

    Where nothing was forgotten the second push were 6, of the first element again.
    """
    sender = Sender(CORRECTED)
    assert [sender.send() for _ in range(4)] == [[4, 0, 0, 0], [0, 5, 0, 0], [10, 0, 0, 0], [0, 0, 6.125, 0]]
    assert torch.equal(GRADIENT, torch.tensor([4.0, 2.0, 1.0, 0.0])), "it is the network's"


@pytest.mark.light
def test_where_everything_is_sent_nothing_is_forgotten() -> None:
    sender = Sender(CORRECTED | {"compression_ratio": 1.0})
    assert [sender.send() for _ in range(3)] == [[4, 2, 1, 0], [6, 3, 1.5, 0], [7, 3.5, 1.75, 0]]


@pytest.mark.light
def test_weight_decay_comes_before_the_momentum_and_nesterov_looks_ahead() -> None:
    """g = 1 + 0.5 * 2 = 2; u = 2, then 0.5 * 2 + 2 = 3; with Nesterov g + 0.5 * u."""
    everything = CORRECTED | {"compression_ratio": 1.0}
    for nesterov, expected in ((False, [2, 3]), (True, [3, 3.5])):
        sender = Sender(everything, 2.0, weight_decay=0.5, nesterov=nesterov)
        assert [sender.send(torch.ones(4))[0] for _ in range(2)] == expected
    sender.values.fill_(4.0)  # as a pull does: g = 3, u = 1.5 + 3
    assert sender.send(torch.ones(4))[0] == 3 + 0.5 * 4.5


@pytest.mark.light
def test_servers_are_told_neither_momentum_nor_weight_decay() -> None:
    sgd = {"lr": 0.3, "weight_decay": 0.5, "nesterov": True}
    (served,) = Sender(CORRECTED, **sgd).served
    assert (served["lr"], served["momentum"], served["weight_decay"]) == (0.3, 0.0, 0.0)
    (served,) = Sender(CORRECTED | {"momentum_correction": False}, **sgd).served
    assert (served["lr"], served["momentum"], served["weight_decay"]) == (0.3, 0.5, 0.5)


@pytest.mark.light
def test_the_share_that_is_sent_halves_step_by_step() -> None:
    """From a quarter to 1/64 in four steps; a run that goes on from a checkpoint goes on there."""
    options = {"compression": "topk", "compression_ratio": 1 / 64, "compression_warmup": 4}
    specification = specify(SGD, 1, **options)
    shares = [1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 64]
    assert [share(specification, step) for step in range(6)] == pytest.approx(shares)
    assert share(replace(specification, steps_before=2), 1) == pytest.approx(1 / 32)
    assert share(specify(SGD, 1), 0) == 0.01


@pytest.mark.light
def test_a_worker_sends_fewer_bytes_in_each_step_of_the_warm_up(tmp_path: Path) -> None:
    """8 bytes for each of 16, 8, 4, 2, 1 and 1 elements."""
    options = {"compression": "topk", "compression_ratio": 1 / 64, "compression_warmup": 4}
    with PlainRoles(tmp_path, (64,), **options) as run:
        worker, _ = run.joined()
        sent = [0]
        for _ in range(6):
            run.step(worker)
            sent.append(worker.counters.bytes_sent)
    steps = [after - before for before, after in itertools.pairwise(sent)]
    assert [before - after for before, after in itertools.pairwise(steps)] == [64, 32, 16, 8, 0]


@pytest.mark.parametrize("pulled", ["none", "topk"])
@pytest.mark.parametrize(("options", "workers"), [(SGD, 1), (NESTEROV, 2)], ids=["weight decay", "nesterov, groups"])
def test_where_everything_is_sent_it_is_the_momentum_of_one_process(
    options: dict[str, Any], workers: int, pulled: str, tmp_path: Path
) -> None:
    """To float32, in which top-k sends. A momentum that is given is not used, since it is no worker's own."""
    expected, state = run_apart(train_alone, options, batches(5, 12))
    corrected = {"compression": "topk", "compression_ratio": 1.0, "momentum_correction": True}
    corrected["pull_compression"] = pulled
    with Roles(tmp_path, specify(options, workers, servers=2, **corrected)) as run:
        results = run.train(train, options, shares_of(workers, 12), 12, 1, state)
    for network, _ in results:
        assert distance(network, expected) < 1e-6
    got = results[0][1]
    assert got["state"] == {}
    assert got["param_groups"] == state["param_groups"]


@pytest.mark.parametrize("limit", [{"clip_norm": 0.3}, {"clip_value": 0.02}], ids=str)
def test_async_clips_a_gradient_before_it_becomes_velocity(limit: dict[str, float], tmp_path: Path) -> None:
    def clip(parameters: list[nn.Parameter]) -> None:
        if "clip_norm" in limit:
            nn.utils.clip_grad_norm_(parameters, limit["clip_norm"])
        else:
            nn.utils.clip_grad_value_(parameters, limit["clip_value"])

    expected, _ = run_apart(train_alone, SGD, batches(5, 12), clip)
    corrected = {"compression": "topk", "compression_ratio": 1.0, "momentum_correction": True}
    with Roles(tmp_path, specify(SGD, 1, mode="async", **limit, **corrected)) as run:
        ((network, _),) = run.train(train, SGD, [slice(0, 12)], 12)
    assert distance(network, expected) < 1e-6


@pytest.mark.light
def test_a_push_that_is_sent_again_is_the_same(tmp_path: Path) -> None:
    """The third push goes to a server that has died; the copy gets it. The numbers are those of the test above."""
    with PlainRoles(tmp_path, (4,), servers=2, replication=2, **CORRECTED) as run:
        worker, (values,) = run.joined()
        for number in range(4):
            worker.begin_step(run.options, 1)
            if number == 2:
                run.kill(dead := cut(run.specification)[0].servers[0])
            worker.push(0, GRADIENT)
            worker.end_step()
            if number == 2:
                run.publish(servers=tuple(info for info in run.view.servers if info.id != dead))
            worker.wait_all()
        assert values.tolist() == [-0.5 * sent for sent in (4 + 10, 5, 6.125, 0)]


@pytest.mark.light
def test_who_takes_a_workers_place_begins_without_velocity_and_goes_on_with_the_warm_up(tmp_path: Path) -> None:
    """Of 64 elements the steps send 16, 8 and 4; the third is another worker's, and sends its gradient alone."""
    gradient = torch.arange(64.0)
    options = CORRECTED | {"mode": "async", "compression_ratio": 1 / 64, "compression_warmup": 4}
    with PlainRoles(tmp_path, (64,), **options) as run:
        worker, _ = run.joined()
        for _ in range(2):
            run.step(worker, [gradient])
        run.with_worker(0, 1)
        values = torch.zeros(64)
        second = run.connect(0, [values], 1)
        assert second.join() == 2
        before = values.clone()
        run.step(second, [gradient])
    assert torch.equal(before - values, 0.5 * torch.cat([torch.zeros(60), gradient[60:]]))


def distance(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative one of a parameter's change."""
    first = make_network().state_dict()
    return max(float((got[name] - value).norm() / (value - first[name]).norm()) for name, value in expected.items())


@pytest.mark.light
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "onebit"}, r"is for compression='topk', .*not compression='onebit': leave it out"),
        ({"mode": "local"}, r"momentum_correction=True is not for mode='local'"),
        ({"clip_norm": 0.5}, r"clipped at 0.5, in mode='sync' .*use mode='async'"),
        ({"mode": "ssp", "clip_value": 0.5}, r"clipped at 0.5, in mode='ssp'"),
        ({"compression_warmup": -1}, r"compression_warmup=-1: use at least 0"),
        ({"compression_warmup": 9, "compression": "onebit"}, r"compression_warmup=9 is for compression='topk'"),
        ({"compression_warmup": 9, "compression_ratio": 0.25}, r"compression_warmup=9 with compression_ratio=0.25"),
    ],
)
def test_what_cannot_be_right_is_refused_with_the_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        specify(SGD, 2, **{"compression": "topk", "momentum_correction": True} | options)


@pytest.mark.light
@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"name": "AdamW"}, r"is for torch.optim.SGD, not torch.optim.adamw.AdamW"),
        ({"name": "SGD", "lr": 0.1}, r"with momentum=0: there is nothing to correct"),
        ({"name": "SGD", "lr": 0.1, "momentum": 0.9, "dampening": 0.1}, r"dampening=0.1 of parameter group 0"),
        ({"name": "SGD", "lr": 0.1, "momentum": 0.9, "maximize": True}, r"maximize=True of parameter group 0"),
    ],
)
def test_optimizers_whose_momentum_is_not_made_here_are_refused(optimizer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        specify(optimizer, 2, compression="topk", momentum_correction=True)
