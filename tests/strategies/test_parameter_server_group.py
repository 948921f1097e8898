from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cnnstrategies.strategies import ParameterServerStrategy
from cnnstrategies.strategies.parameter_server import base as group_module
from cnnstrategies.strategies.parameter_server.base import WorkerGroup
from cnnstrategies.strategies.parameter_server.run import Place


class Gone:
    """The collectives of a run whose other workers do not answer any more."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} would wait for ever")


def test_after_a_stop_a_worker_waits_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """In async and ssp the others may be in another step, or have ended."""
    told: list[tuple[str, int]] = []
    membership: Any = SimpleNamespace(announce=lambda *notice: told.append(notice), announced=lambda name: None)
    monkeypatch.setattr(group_module, "worker_address", lambda options, place, rank: None)
    monkeypatch.setattr(group_module, "Membership", lambda address, keys: membership)
    monkeypatch.setattr(group_module, "Collectives", lambda membership: Gone())
    group, place = WorkerGroup(), Place("ipc://coordinator")
    group.open(ParameterServerStrategy().options, place, 1, 3)
    assert group.agree_to_stop(None) is None
    assert group.agree_to_stop(15) == 15
    assert told == [("stop", 15)]
    assert group.gather("mine", "metric") == {1: "mine"}
    assert group.broadcast("mine", 0) == "mine"
    assert float(group.reduce(torch.tensor(2.0), "sum")) == 2
    assert group.decide(True, all=True)
