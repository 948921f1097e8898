"""Messages between ranks: reads are answered, and ranks that have diverged end with a line that names both places."""

import copy
import gc
import inspect
from collections import Counter

import lightning.pytorch
import pytest
import torch
from torch import nn

from cnnstrategies.placed import DivergedError, ForeignTensor, GlooLink, Places, RefusedError
from cnnstrategies.placed.call_site import call_site
from cnnstrategies.placed.messages import Messages
from tests.placed.placements import place_all
from tests.placed.turns import on_ranks, outcomes
from tests.runner.ranks import run_ranks


def line_of(function, text):
    """Return the file and line number of a function's line that contains a text."""
    lines, start = inspect.getsourcelines(function)
    (offset,) = [i for i, line in enumerate(lines) if text in line]
    return f"test_messages.py:{start + offset}"


def reads_on_rank_0_only(places):
    loss, accuracy = place_all(places, [torch.tensor(2.0), torch.tensor(0.5)], [(1,)])
    if places.rank == 0:
        loss.item()
    accuracy.item()


def another_order(places):
    weights = {name: places.give(torch.ones(3), (1,), name) for name in "ab"}
    for name in "ab" if places.rank else "ba":
        weights[name].tolist()


def reads_more_often(places):
    (loss,) = place_all(places, [torch.tensor(2.0)], [(1,)])
    for _ in range(2 if places.rank == 0 else 1):
        loss.item()


@pytest.mark.light
def test_ranks_that_have_diverged_name_both_lines():
    _, errors = outcomes(2, reads_on_rank_0_only)
    (error,) = filter(None, errors)
    assert isinstance(error, DivergedError)
    for text in ("loss.item()", "accuracy.item()"):
        assert line_of(reads_on_rank_0_only, text) in str(error)
    assert "\n" not in str(error)


def defined_in(path, text):
    """Return the function ``run(function)`` that a text defines, as if it were in a file of a library."""
    namespace = {"call_site": call_site}
    exec(compile(text, path, "exec"), namespace)
    return namespace["run"]


@pytest.mark.light
def test_the_line_that_has_called_fit_is_no_place_in_the_run():
    """Rank 0 may run it in another program than the ranks that it has started."""
    trainer = defined_in(
        lightning.pytorch.trainer.trainer.__file__, "def fit(function):\n    return function()\nrun = fit"
    )
    loop = defined_in(lightning.pytorch.trainer.call.__file__, "def run(function=call_site):\n    return function()")

    def users_step():
        return loop()

    assert trainer(loop) == "call.py:2"
    assert trainer(lambda: loop(users_step)) == line_of(users_step, "return loop()")
    assert loop() == line_of(test_the_line_that_has_called_fit_is_no_place_in_the_run, "assert loop() ==")


@pytest.mark.light
def test_a_value_that_is_never_sent_ends_with_the_line_that_waits_for_it():
    _, errors = outcomes(2, reads_more_often)
    assert isinstance(errors[0], DivergedError)
    assert line_of(reads_more_often, "loss.item()") in str(errors[0])
    assert "rank 1" in str(errors[0])
    assert errors[1] is None


@pytest.mark.light
def test_tensors_of_equal_shape_in_another_order_are_noticed():
    _, errors = outcomes(2, another_order)
    assert any(
        isinstance(error, DivergedError) and "a (3,)" in str(error) and "b (3,)" in str(error) for error in errors
    )


@pytest.mark.light
def test_code_that_reads_nothing_of_other_ranks_may_run_on_one_rank():
    def program(places):
        loss, common = place_all(places, [torch.tensor(2.0), torch.tensor(3.0)], [(1,), None])
        seen = []
        if places.rank == 0:
            seen += [common.item(), repr(loss), str(loss.shape)]
        return [*seen, loss.item()]

    assert on_ranks(2, program) == [
        [3.0, "tensor(size=(), dtype=torch.float32, on ranks [1])", "torch.Size([])", 2.0],
        [2.0],
    ]


@pytest.mark.light
def test_copies_that_differ_are_read_from_the_first_rank_of_their_place():
    def program(places):
        value = places.give(torch.tensor(1.0 + places.rank), (1, 2))
        return value.item(), value.tolist(), "yes" if value > 2.5 else "no"

    assert on_ranks(3, program) == [(2.0, 2.0, "no")] * 3


@pytest.mark.light
def test_a_value_is_read_after_it_has_been_written():
    def program(places):
        value = places.give(torch.zeros(2), (1,))
        seen = []
        for step in range(3):
            value.add_(1)
            value.data.add_(1)
            seen.append((value.sum().item(), value.tolist(), f"{value[0]:.1f}", (value + step).tolist()))
        return seen

    assert (
        on_ranks(2, program)
        == [
            [
                (4.0, [2.0, 2.0], "2.0", [2.0, 2.0]),
                (8.0, [4.0, 4.0], "4.0", [5.0, 5.0]),
                (12.0, [6.0, 6.0], "6.0", [8.0, 8.0]),
            ]
        ]
        * 2
    )


@pytest.mark.light
def test_operands_of_one_place_share_a_message():
    def program(places):
        parts = [places.give(torch.ones(2), (0,)) for _ in range(5)]
        target = places.give(torch.ones(50), (1,))
        torch.cat([*parts, target])
        torch.zeros_like(target).add_(target).mul_(2)
        return sum(places.messages.counts.values())

    assert on_ranks(3, program) == [1, 0, 0]


@pytest.mark.light
def test_clipping_takes_a_message_of_each_rank_however_many_gradients_there_are(monkeypatch):
    foreign, create = Counter(), ForeignTensor.create

    def counted(places, *form, **options):
        foreign[places.rank] += 1
        return create(places, *form, **options)

    def clipped(places, count):
        parameters = [nn.Parameter(place_all(places, torch.ones(4), [(index % 2,)])) for index in range(count)]
        for parameter in parameters:
            parameter.grad = parameter.detach() * 2
        messages = places.messages.counts.total()
        foreign[places.rank] = 0
        total = nn.utils.clip_grad_norm_(parameters, 1.0)
        return places.messages.counts.total() - messages, foreign[places.rank], total.item()

    monkeypatch.setattr(ForeignTensor, "create", staticmethod(counted))
    assert on_ranks(2, lambda places: clipped(places, 4)) == [(1, 1, 8.0)] * 2
    assert on_ranks(2, lambda places: clipped(places, 36)) == [(1, 1, 24.0)] * 2


@pytest.mark.light
def test_a_stage_cannot_read_values_of_other_ranks():
    def program(places):
        value = places.give(torch.ones(2), (1,))
        with places.local():
            if places.rank == 1:
                return (value * 2).sum().item()
            value.add_(1)
            assert isinstance(value * 2, ForeignTensor)
            with pytest.raises(RefusedError, match=r"_local_scalar_dense of a tensor \(\) needs values of other ranks"):
                value.sum().item()
            return None

    assert on_ranks(2, program) == [None, 4.0]


@pytest.mark.light
def test_access_to_a_storage_that_the_rank_lacks_is_refused():
    def program(places):
        value = places.give(torch.ones(2), (1,), "weights")
        if places.rank == 0:
            for function in (ForeignTensor.data_ptr, ForeignTensor.untyped_storage):
                with pytest.raises(RefusedError, match=r"needs the values of tensor\(weights, size=\(2,\)"):
                    function(value)
            assert value.share_memory_() is value

    on_ranks(2, program)


@pytest.mark.light
def test_a_parameter_that_is_put_away_keeps_its_identity():
    def program(places):
        layer = nn.Linear(2, 2)
        layer.register_buffer("count", torch.zeros(1))
        weight, calls = layer.weight, []
        weight.register_hook(lambda gradient: calls.append(places.rank))
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            if places.rank == 1:
                places.mark(tensor, (1,), name)
            else:
                places.put_away(tensor, (1,), name)
        assert layer.weight is weight
        assert isinstance(weight, nn.Parameter)
        assert isinstance(weight, ForeignTensor) == (places.rank == 0)
        assert optimizer.param_groups[0]["params"][0] is weight
        assert not isinstance(layer.count, nn.Parameter)
        again = copy.deepcopy(layer)
        assert places.place_of(again.weight) == places.place_of(again.count) == (1,)
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert calls == [places.rank], "autograd still knows the hook"
        return (weight - again.weight).abs().max().item()

    assert on_ranks(2, program) == [pytest.approx(0.1)] * 2


def byte_tensors():
    return sum(type(value) is torch.Tensor and value.dtype is torch.uint8 for value in gc.get_objects())


def over_gloo():
    rank = torch.distributed.get_rank()
    group = torch.distributed.new_group([0, 1])
    link = GlooLink(group, rank, 2)
    results = []
    with Places(rank, 2, link) as places:
        small, large = place_all(places, [torch.arange(3.0), torch.arange(3000.0)], [(0,), (1,)])
        results += [small.tolist(), large.sum().item(), (small.sum() + large).tolist()[:2], large.tolist()[-1]]
        for step in range(20):
            results.append((small * step).sum().item())
        before = byte_tensors()
        for _ in range(20):
            small.sum().item(), large.sum().item()
        # The last message of each rank may not have been acknowledged.
        assert byte_tensors() <= before + 2, "messages that have been sent are kept"
        if rank == 0:  # Rank 1 ends its training instead.
            with pytest.raises(
                DivergedError, match=r"rank 1, which should send tolist .* test_messages.py:\d+: rank 1 has ended"
            ):
                large.tolist()
    link.close()
    return results


def test_ranks_send_values_over_gloo():
    expected = [[0.0, 1.0, 2.0], 4498500.0, [3.0, 4.0], 2999.0, *[3.0 * step for step in range(20)]]
    assert run_ranks(2, over_gloo) == [expected, expected]


@pytest.mark.light
def test_a_message_with_another_number_is_refused():
    sent = []

    class Recorded:
        def send(self, target, message):
            sent.append(message)

        def receive(self, source):
            return sent[-1]

        def close(self):
            pass

    first, second = Messages(0, 2, Recorded()), Messages(1, 2, Recorded())
    first.send(1, "a value", 1 + 2j)
    assert second.receive(0, "a value") == 1 + 2j
    with pytest.raises(
        DivergedError, match=r"rank 1 waits for a value .message 1. from rank 0, which sends a value .message 0"
    ):
        second.receive(0, "a value")
