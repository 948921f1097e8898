"""Every wait of the training thread for other processes is reported, and torch's methods are restored at the end."""

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import barrier  # A user's module may import the functions before there is a watcher.
from torch.nn.parallel import DistributedDataParallel

from cnnstrategies._torch_private import COLLECTIVES
from cnnstrategies.runtime.waiting import report_forwards, unwatch, waiting, watch
from tests.runner.ranks import run_ranks


class Arrivals:
    """A watcher on rank 1. Rank 0 calls each collective only after rank 1 has reported its wait.

    Rank 0 is late, because it does not wait in DDP's broadcast.

    Attributes:
        kinds: Kinds of the waits since the last call of :meth:`meet`.
        sees_arrival: Whether the last wait ended after rank 0 had called the collective.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.store = dist.FileStore(str(Path("arrivals").resolve()), 2)
        self.store.set_timeout(timedelta(seconds=40))
        self.number = 0
        self.kinds: list[str] = []
        self.sees_arrival = False

    def begin_waiting(self, kind: str) -> None:
        self.kinds.append(kind)
        if self.rank == 1:
            self.store.set(f"{self.number} waits", "yes")

    def end_waiting(self) -> None:
        self.sees_arrival = self.rank == 1 and self.store.check([f"{self.number} arrives"])

    def meet(self, collective: Callable[[], Any]) -> list[str]:
        """Call a collective on both ranks, and return the kinds of the reported waits."""
        self.number += 1
        self.kinds = []
        if self.rank == 0:
            self.store.wait([f"{self.number} waits"])
            self.store.set(f"{self.number} arrives", "yes")
        collective()
        assert self.rank == 0 or self.sees_arrival, "the wait ends only after rank 0 has arrived"
        return sorted(set(self.kinds))


def wait_in_many_ways() -> dict[str, list[str]]:
    watcher, ones = Arrivals(), torch.ones(2)
    original = dist.ProcessGroup.allreduce, dist.Work.wait
    model = DistributedDataParallel(nn.BatchNorm1d(2))
    report_forwards(model)
    peer = 1 - watcher.rank
    watch(watcher)
    kinds = {
        name: watcher.meet(collective)
        for name, collective in {
            "barrier": barrier,
            "sum": lambda: dist.all_reduce(ones.clone()),
            "later": lambda: dist.all_reduce(ones.clone(), async_op=True).wait(),
            "future": lambda: dist.broadcast(ones.clone(), 0, async_op=True).get_future().wait(),
            "objects": lambda: dist.all_gather_object([None, None], "text"),
            "monitored": dist.monitored_barrier,
            "pair": lambda: dist.recv(ones.clone(), peer) if watcher.rank else dist.send(ones, peer),
            "forward": lambda: model(torch.ones(3, 2)),
        }.items()
    }
    unwatch(watcher)
    assert (dist.ProcessGroup.allreduce, dist.Work.wait) == original
    watcher.kinds = []
    dist.all_reduce(ones)  # The restored methods work, and report no wait.
    assert watcher.kinds == []
    return kinds


def test_every_wait_for_other_ranks_is_reported_while_it_lasts() -> None:
    of_rank_0, of_rank_1 = run_ranks(2, wait_in_many_ways)
    assert of_rank_0.pop("pair") == ["send"]
    assert of_rank_1.pop("pair") == ["recv"]
    assert of_rank_0 == of_rank_1
    assert of_rank_0.pop("objects") in (["all_gather_single"], ["_allgather_base"], ["allgather"])  # by torch's version
    assert of_rank_0 == {
        "barrier": ["barrier"],
        "sum": ["allreduce"],
        "later": ["allreduce"],
        "future": ["broadcast"],
        "monitored": ["monitored_barrier"],
        "forward": ["buffers"],
    }


class Kinds(list[str]):
    """A watcher that lists the kinds of waits."""

    def begin_waiting(self, kind: str) -> None:
        self.append(kind)

    def end_waiting(self) -> None:
        self.append("end")


def test_waits_inside_waits_and_waits_of_other_threads_are_not_reported() -> None:
    kinds = Kinds()
    watch(kinds)
    try:
        with waiting("servers"), waiting("barrier"):
            pass
        with pytest.raises(ValueError, match="lost"), waiting("servers"):
            raise ValueError("lost")
        with waiting("servers"):
            pass

        def saves() -> None:
            with waiting("barrier"):
                pass

        thread = threading.Thread(target=saves)
        thread.start()
        thread.join()
    finally:
        unwatch(kinds)
    with waiting("servers"):
        pass
    assert kinds == ["servers", "end"] * 3


def test_all_collectives_of_a_process_group_are_known() -> None:
    """If torch adds a method to ProcessGroup, add it to COLLECTIVES or to the methods that do not wait here."""
    without_waits = {
        "abort", "boxed", "get_backend", "get_group_store", "get_reconfigure_handle", "merge_remote_group", "name",
        "new_window", "rank", "reconfigure", "set_timeout", "shutdown", "size", "split_group", "unbox",
        *(f"{verb}_{hook}_hook" for verb in ("register", "unregister") for hook in ("abort", "post", "pre")),
    }  # fmt: skip
    public = [name for name in dir(dist.ProcessGroup) if name.islower() and not name.startswith(("_", "supports_"))]
    methods = {name for name in public if callable(getattr(dist.ProcessGroup, name))}
    assert methods - without_waits <= set(COLLECTIVES)
    assert {"allreduce", "_allgather_base", "broadcast", "barrier", "send", "recv"} <= set(dir(dist.ProcessGroup))
