"""Each private torch name that the package uses still works as expected; see `_torch_private.py`."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ExponentialLR, SequentialLR
from torch.overrides import TorchFunctionMode

from cnnstrategies._torch_private import (
    PARTS_OF_A_SCHEDULE,
    asks_default_group,
    communication_seconds,
    compile_again_for_other_hooks,
    default_store,
    functions_without,
    is_compiling,
    measure_every_step,
    norms_of,
    number_of_collectives,
    parameters_in,
    without_values,
)
from cnnstrategies.paramserver import process_group
from cnnstrategies.placed import Places
from cnnstrategies.placed.runner import Operations
from tests.runner.ports import free_port
from tests.runner.ranks import run_apart


def step(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(500, 500) for _ in range(4)]), bucket_cap_mb=1)
    measure_every_step(model)
    figures = []
    for _ in range(14):  # By default DDP times the first ten steps only.
        model(torch.randn(8, 500)).sum().backward()
        figures.append(communication_seconds(model))
    assert all(0 < total < 600 and 0 <= hidden <= total for total, hidden in figures[1:])
    assert len(set(figures[-4:])) == 4, "every step is measured again"
    before, other_group = number_of_collectives(), dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(1), group=other_group)
    assert number_of_collectives() == before
    dist.all_reduce(torch.ones(1))
    assert number_of_collectives() == before + 1
    dist.destroy_process_group()


def test_the_reducer_times_the_all_reduce_of_every_step(tmp_path):
    mp.start_processes(step, args=(tmp_path / "store",), nprocs=2, start_method="fork")


def test_a_combined_schedule_has_its_parts_and_their_states():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    parts = [ConstantLR(optimizer), ExponentialLR(optimizer, gamma=0.5)]
    for whole in (SequentialLR(optimizer, parts, [2]), ChainedScheduler(parts, optimizer)):
        assert list(getattr(whole, PARTS_OF_A_SCHEDULE)) == parts
        assert [state["last_epoch"] for state in whole.state_dict()[PARTS_OF_A_SCHEDULE]] == [
            state.last_epoch for state in parts
        ]


def share(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    blocked = threading.Thread(target=dist.distributed_c10d._get_default_store().get, args=("never",), daemon=True)
    blocked.start()
    store = default_store()
    store.set(f"rank {rank}", "here")
    assert store.get(f"rank {1 - rank}") == b"here", "the connection is a new one, which no other thread uses"
    assert isinstance(store.underlying_store, (dist.PrefixStore, dist.TCPStore))
    dist.barrier()
    os._exit(0)


def test_the_default_store_has_a_new_connection_for_each_caller():
    mp.start_processes(share, args=(free_port(),), nprocs=2, start_method="fork")


def test_all_parameters_of_nested_and_shared_modules_are_listed():
    shared = nn.Linear(2, 2)
    module = nn.Sequential(shared, nn.Sequential(nn.BatchNorm1d(2), shared, nn.ParameterList([torch.ones(1)])))
    module.register_parameter("own", nn.Parameter(torch.ones(2)))
    module.register_parameter("none", None)
    module.register_module("empty", None)
    assert set(parameters_in(module)) == set(module.parameters())


def test_the_rules_for_operations_run_without_torchs_wrapper():
    assert not hasattr(Operations.__torch_dispatch__, "__wrapped__")
    assert not is_compiling()
    with Places(0, 1, None):  # A single rank has no messages.
        doubled = torch.compile(lambda values: values * 2, backend="eager")
        assert doubled(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]


def test_a_compiled_function_runs_a_hook_that_was_registered_after_its_compilation():
    module = nn.Sequential(nn.Identity())
    compile_again_for_other_hooks()
    run = torch.compile(lambda values: module(values), backend="eager")
    assert run(torch.ones(2)).tolist() == [1.0, 1.0]
    module[0].register_forward_hook(lambda module, inputs, output: output * 3)
    assert run(torch.ones(2)).tolist() == [3.0, 3.0]


def test_a_function_mode_is_on_again_below_modes_that_a_generator_has_entered():
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def batches():
        with torch.device("cpu"):
            yield torch.ones(2)
            yield torch.ones(3)

    seen, iterator, mode = [], batches(), Mode()
    with mode:
        with functions_without(mode):
            assert len(next(iterator)) == 2
        assert not seen
        with functions_without(mode):
            assert len(next(iterator)) == 3
        iterator.close()
        seen.clear()
        torch.ones(1)
        assert seen
    before = len(seen)
    torch.ones(1)
    assert len(seen) == before


def test_norms_of_tensors_of_several_dtypes() -> None:
    tensors = [torch.tensor(-2.0), torch.full((3, 2), 2.0**12, dtype=torch.float16), torch.tensor([3.0, 4.0]).double()]
    assert norms_of(tensors).tolist() == [2.0, pytest.approx(2.0**12 * 6**0.5), 5.0]


def test_a_process_may_fork_after_a_backward_without_values():
    with without_values():
        layer = nn.Linear(3, 2)
        result = layer(torch.ones(4, 3)).sum()
        result.backward()
    assert layer.weight.grad.shape == (2, 3)
    gradient = run_apart(backward_of_one)
    assert gradient == 1.0


def backward_of_one():
    value = torch.ones((), requires_grad=True)
    value.backward()
    return value.grad.item()


def test_a_group_of_the_coordinator_is_made_where_torch_does_not_ask_for_it(monkeypatch):
    """The newest torch asks the default group, and torch 2.11 does not."""
    made = []
    default = process_group.CoordinatorGroup(0, 2, exchange := SimpleNamespace(alone=False))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=default))
    new_group = process_group._asking(lambda *arguments, **options: made.append((arguments, options)))
    new_group(backend="gloo", timeout=3, group_desc="some")
    assert made == [((None, 3, process_group.BACKEND, exchange), {"group_desc": "some"})]
    dist.group.WORLD = None
    new_group([0], backend="gloo")
    assert made[1] == (([0], None, "gloo", None), {})
    assert asks_default_group() or torch.__version__ < "2.15"
