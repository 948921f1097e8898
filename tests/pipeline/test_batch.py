"""Tests of the data that ranks exchange about a batch: only plain data, and errors that all ranks raise."""

import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cnnstrategies.codec import CodecError
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline import engine_batch, transport
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.engine_batch import share_batch
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.runtime import groups
from cnnstrategies.runtime.groups import broadcast_value
from tests.runner.ranks import run_ranks


class Hostile:
    """An object whose pickle makes a folder when it is loaded."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def refuses(read: Callable[[], object]) -> None:
    with pytest.raises((CodecError, RuntimeError)):
        read()
    assert not Path("executed").exists()


def a_peer_sends_pickles() -> None:
    placement = Placement((1, 1), microbatches=1)
    data = pickle.dumps(Hostile())
    link = Transport(placement, timedelta(seconds=20))
    images = torch.zeros(4, 1, 2, 2)
    if link.rank == 0:
        transport.encode = lambda value: [data]  # type: ignore[attr-defined]
        groups.to_bytes = engine_batch.to_bytes = lambda value: data  # type: ignore[attr-defined]
        for pending in link.send_object(None, 1, "a message"):
            pending.wait()
        refuses(lambda: broadcast_value(None, 0))
        refuses(lambda: share_batch(images, [], link))
    else:
        refuses(lambda: link.receive_object(0, "a message"))
        refuses(lambda: broadcast_value(None, 0))
        refuses(lambda: share_batch(None, [], link))
    dist.barrier()


def test_pickled_objects_of_a_peer_are_not_executed() -> None:
    run_ranks(2, a_peer_sends_pickles)


def refusal() -> str:
    """Return this rank's error message for images of two sizes."""
    pipeline = Pipeline(nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3)), ["0"], [2, 1], 4)
    with pytest.raises(ConfigurationError) as error:
        pipeline.share(torch.zeros(8, 1, 6, 6 + 2 * dist.get_rank()))
    pipeline.close()
    return str(error.value)


def test_batches_that_do_not_fit_together_are_refused_on_every_rank() -> None:
    for message in run_ranks(3, refusal):
        assert "images of different sizes in one step, [(1, 6, 6), (1, 6, 8)]" in message
