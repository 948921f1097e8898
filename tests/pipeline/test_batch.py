"""Tests of the data that ranks exchange about a batch: only plain data, and errors that all ranks raise."""

import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from cnnstrategies.codec import CodecError
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline import batch, transport
from cnnstrategies.pipeline.batch import share_batch
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.timetable import Placement, RankPlace
from cnnstrategies.pipeline.transport import Transport, broadcast_value


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
        transport.to_bytes = batch.to_bytes = lambda value: data  # type: ignore[attr-defined]
        for pending in link.send_object(None, 1, "a message"):
            pending.wait()
        refuses(lambda: broadcast_value(None, 0))
        refuses(lambda: share_batch(images, [], None, link))
    else:
        refuses(lambda: link.receive_object(0, "a message"))
        refuses(lambda: broadcast_value(None, 0))
        refuses(lambda: share_batch(None, [], None, link))
    dist.barrier()


def test_pickled_objects_of_a_peer_are_not_executed() -> None:
    run_ranks(2, a_peer_sends_pickles)


@pytest.mark.light
def test_a_batch_that_cannot_be_sent_is_refused_with_its_class_name() -> None:
    link: Any = SimpleNamespace(check_peers=lambda: None, place=RankPlace(0, 0))
    form = ("same", SimpleNamespace(crs=4326))
    with pytest.raises(
        ConfigurationError,
        match=r"collate_fn returns a batch .*: an object of type types.SimpleNamespace cannot be sent",
    ):
        share_batch(torch.zeros(4, 1, 2, 2), [], form, link)


def refusals() -> list[str | None]:
    """Return this rank's error message, or None, in each of four cases.

    The cases are: all ranks have ended the epoch, all ranks except rank 0, only rank 0, and images of two sizes.
    """
    rank = dist.get_rank()
    pipeline = Pipeline(nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3)), ["0"], [2, 1], 4)
    messages: list[str | None] = []
    for ends, size in ((True, 6), (rank > 0, 6), (rank == 0, 6), (False, 6 + 2 * rank)):
        try:
            if ends:
                pipeline.end_together()
            else:
                pipeline.share(torch.zeros(8, 1, 6, size))
            messages.append(None)
        except ConfigurationError as error:
            messages.append(str(error))
    pipeline.close()
    return messages


def test_batches_that_do_not_fit_together_are_refused_on_every_rank() -> None:
    alone = "ended an epoch, or training, while rank{} continued with another batch"
    for all_ended, others_ended, first_ended, sizes in run_ranks(3, refusals):
        assert all_ended is None
        assert "ranks 1, 2 " + alone.format(" 0") in str(others_ended)
        assert "rank 0 " + alone.format("s 1, 2") in str(first_ended)
        assert "images of different sizes in one step, [(1, 6, 6), (1, 6, 8)]" in str(sizes)
