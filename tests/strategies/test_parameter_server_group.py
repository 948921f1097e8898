from types import SimpleNamespace
from typing import Any

import torch

from cnnstrategies.strategies.parameter_server.group import WorkerGroup


class Gone:
    """The collectives of a run whose other workers do not answer any more."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} would wait for ever")


def test_after_a_stop_a_worker_waits_for_no_other() -> None:
    """In async and ssp the others may be in another step, or have ended."""
    told: list[tuple[str, int]] = []
    membership: Any = SimpleNamespace(announce=lambda *notice: told.append(notice), announced=lambda name: None)
    group, collectives = WorkerGroup(), Gone()
    group.rank, group.world_size = 1, 3
    group._membership, group._collectives = membership, collectives  # type: ignore[assignment]
    assert group.agree_to_stop(None) is None
    assert group.agree_to_stop(15) == 15
    assert told == [("stop", 15)]
    assert group.gather("mine", "metric") == {1: "mine"}
    assert group.broadcast("mine", 0) == "mine"
    assert float(group.reduce(torch.tensor(2.0), "sum")) == 2
    assert group.decide(True, all=True)
