"""Pulls of compressed changes: workers lack only what a change leaves out, and later changes add what was left out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.compression import FP16, OneBit, TopK
from cnnstrategies.paramserver.messages import ALONE, Encoding, Header, Kind
from cnnstrategies.paramserver.server.store import Changes
from cnnstrategies.paramserver.slicing import cut
from cnnstrategies.paramserver.worker.pulls import PulledValues
from tests.paramserver.roles import PlainRoles, Roles, join
from tests.paramserver.test_sync import shares_of, train
from tests.paramserver.training import SGD, batches, make_network, make_optimizer, make_scheduler, specify
from tests.runner.ranks import run_apart

STEPS, RATIO = 5, 0.2


@pytest.mark.light
def test_a_change_goes_only_to_workers_with_the_values_that_it_builds_on() -> None:
    value = torch.tensor([1.0, 2.0])
    changes = Changes(TopK.encoding, 0.5, {0: value})
    mark = changes.mark(0)
    assert changes.answer(0, mark, True) == (bytes(value.numpy()), Encoding.DENSE, mark), "no change was made"
    value.add_(1.0)
    payload = changes.make(0)
    assert changes.answer(0, mark, True) == (payload, TopK.encoding, mark)
    whole = bytes(changes.known[0].numpy()), Encoding.DENSE, mark
    for other, next_version in ((mark, False), (0.0, True), (mark + 1, True)):
        assert changes.answer(0, other, next_version) == whole


@pytest.mark.light
def test_a_worker_adds_a_change_only_to_the_values_that_it_builds_on() -> None:
    slices = cut(specify(SGD, 1))
    pulled, change = PulledValues(slices), torch.ones(slices[0].numel, dtype=torch.float64)
    header = Header(Kind.PULLED, 0, 0, 1, Encoding.DENSE, base=3, weight=5.0)
    whole = pulled.take(header, change)
    assert whole is not None
    for base, mark in ((3, 5.0), (5, 5.0), (4, 6.0)):
        assert pulled.take(header._replace(encoding=TopK.encoding, base=base, weight=mark), change) is None
    nearer = pulled.take(header._replace(encoding=TopK.encoding, base=4), change)
    assert nearer is not None
    assert nearer.unique().tolist() == [2.0]


@pytest.mark.light
def test_a_worker_that_wants_a_change_gets_values_if_none_was_made() -> None:
    """Check the server, and a copy that takes over the values that workers had many steps before."""
    value = torch.ones(4)
    changes, copy = (Changes(OneBit.encoding, 0.5, {0: value}, FP16.encoding) for _ in range(2))
    value.add_(1.0)
    assert not changes.make(0, {Encoding.DENSE})
    copy.take_over(0, changes.known[0], 0, 0 in changes.behind)
    for server_changes in (changes, copy):
        assert server_changes.answer(0, server_changes.mark(0), True, OneBit.encoding) == (
            bytes(value.numpy()),
            Encoding.DENSE,
            ALONE,
        )


def in_one_process(optimizer_options: dict[str, Any], size: int) -> dict[str, Tensor]:
    """Train servers' values with gradients at the workers' values, which follow by changes; return the latter."""
    values, network = make_network(), make_network()
    optimizer = make_optimizer(values, optimizer_options)
    scheduler = make_scheduler(optimizer)
    slices = cut(specify(optimizer_options, 1))
    for images, targets in batches(STEPS, size):
        network.zero_grad()
        F.cross_entropy(network(images), targets).backward()
        for value, known in zip(values.parameters(), network.parameters(), strict=True):
            value.grad = known.grad
        optimizer.step()
        scheduler.step()
        pairs = [*zip(values.parameters(), network.parameters(), strict=True)]
        for slice_ in slices:
            parts = [(part, *(each.data.view(-1) for each in pairs[part.parameter])) for part in slice_.parts]
            left = torch.cat([(value - known)[part.start : part.stop] for part, value, known in parts]).float()
            largest = left.abs().topk(max(1, round(RATIO * slice_.numel))).indices
            change = torch.zeros(slice_.numel, dtype=torch.float64)
            change[largest] = left[largest].double()
            for (part, _, known), part_change in zip(parts, change.split(slice_.sizes), strict=True):
                known[part.start : part.stop] += part_change
    return network.state_dict()


def test_training_with_changes_equals_one_process_with_the_same_compression(tmp_path: Path) -> None:
    expected = run_apart(in_one_process, SGD, 12)
    more: dict[str, Any] = {"servers": 2, "replication": 2, "topk_density": RATIO}
    specification = specify(SGD, 2, pull_compression="topk", **more)
    with Roles(tmp_path, specification) as run:
        for network, _ in run.train(train, SGD, shares_of(2, 12), 12):
            for name, value in expected.items():
                torch.testing.assert_close(network[name], value, rtol=1e-9, atol=1e-11)


def encodings_by_step(worker: Worker, levels: Sequence[int]) -> None:
    """Let a worker use these levels, one for each step: 0 is dense, 1 is fp16, and 2 is onebit."""
    assert worker.chooser is not None
    worker.chooser.next = worker.chooser.follow = lambda step, _: levels[step]  # type: ignore[method-assign]


@pytest.mark.light
@pytest.mark.parametrize("dies", [4, 6, 9])
def test_a_worker_that_changes_encodings_has_the_values_that_the_server_assumes(dies: int, tmp_path: Path) -> None:
    """Check that a change builds on the rounded values of the step before, also after a backup has taken over."""
    levels, sizes = [0, 1, 2, 2, 2, 1, 2, 0, 0, 2, 2, 2], []
    gradients = torch.randn(len(levels), 40, generator=torch.Generator().manual_seed(0))
    value, known, expected, level_before = nn.Parameter(torch.zeros(40)), torch.zeros(40), [], 0
    optimizer = torch.optim.SGD([value], lr=0.5, momentum=0.5)
    for level, gradient in zip(levels, gradients, strict=True):
        value.grad = gradient
        optimizer.step()
        left = value.detach() - known
        change = torch.where(left > 0, left[left > 0].mean(), left[left <= 0].mean())
        if level == 2 and level_before > 0:
            known = known + change
        else:
            known = value.detach().half().float() if level == 1 else value.detach().clone()
        expected.append(known)
        level_before = level
    with PlainRoles(tmp_path, (40,), servers=2, replication=2, pull_compression="auto") as run:
        (slice_,) = cut(run.specification)
        worker, (pulled,) = run.joined()
        encodings_by_step(worker, levels)
        for step, gradient in enumerate(gradients):
            if step == dies:
                run.lose(slice_.servers[0])
            before = worker.counters.bytes_received
            run.step(worker, [gradient])
            sizes.append(worker.counters.bytes_received - before)
            torch.testing.assert_close(pulled, expected[step], rtol=1e-5, atol=1e-6)
    whole, half, bits = 160, 80, 8 + 5
    assert sizes == [whole, half, bits, bits, bits, half, bits, whole, whole, whole, bits, bits]


@pytest.mark.light
def test_one_workers_change_goes_to_all_workers_that_can_apply_it(tmp_path: Path) -> None:
    """Check that a worker that asks for values gets another worker's change if the worker has the change's base."""
    with PlainRoles(tmp_path, (40,), workers=2, pull_compression="auto") as run:
        workers, values = zip(*(run.worker(number) for number in range(2)), strict=True)
        sizes = []
        for worker, levels in zip(workers, ([1, 2, 2, 0, 2, 2, 2], [1, 1, 2, 0, 0, 2, 2]), strict=True):
            encodings_by_step(worker, levels)
        join(workers)
        for step in range(7):
            before = [worker.counters.bytes_received for worker in workers]
            for number, worker in enumerate(workers):
                run.begin(worker, [torch.randn(40, generator=torch.Generator().manual_seed(2 * step + number))])
            for worker in workers:
                worker.wait_all()
            sizes.append(
                [worker.counters.bytes_received - received for worker, received in zip(workers, before, strict=True)]
            )
            assert torch.equal(values[0][0], values[1][0])
    assert sizes == [[80, 80], [13, 13], [13, 13], [160, 160], [160, 160], [13, 160], [13, 13]]


@pytest.mark.light
def test_validation_has_the_servers_values_and_training_goes_on(tmp_path: Path) -> None:
    with PlainRoles(tmp_path, (40,), workers=1, pull_compression="topk", topk_density=0.1) as run:
        worker, (value,) = run.joined()
        run.step(worker)
        before = value.clone()
        worker.refresh()
        assert not torch.equal(value, before)
        assert value.unique().tolist() == [-0.5], "validation and checkpoints use the servers' own values"
        run.step(worker, 0.0)
        assert (value == 0).sum() == 32, "training goes on from the values to which changes have led"
