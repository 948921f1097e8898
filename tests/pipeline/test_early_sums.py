"""Sums of gradients over a stage's replicas that begin while the last backward of a step still runs."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cnnstrategies.pipeline import early_sums
from cnnstrategies.pipeline.early_sums import EarlySums
from cnnstrategies.pipeline.gradients import bucketed
from cnnstrategies.placed import GlooLink, Places
from tests.pipeline.test_declared_loss import on_one_device, train
from tests.pipeline.test_placed_network import check_equal
from tests.runner.ranks import run_ranks


class Log(list[Any]):
    """A log of a rank: `gradient` when one is ready, the size of a bucket when its sum begins, and `end`."""

    def note(self, monkeypatch: pytest.MonkeyPatch) -> None:
        add, finish, all_reduce = EarlySums._add, EarlySums.finish, dist.all_reduce  # noqa: SLF001

        def added(sums: Any, *args: Any) -> None:
            self.append("gradient")
            add(sums, *args)

        def finished(sums: Any, *args: Any) -> None:
            self.append("end")
            finish(sums, *args)

        def reduced(flat: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.append(len(flat))
            return all_reduce(flat, *args, **kwargs)

        monkeypatch.setattr(EarlySums, "_add", added)
        monkeypatch.setattr(EarlySums, "finish", finished)
        monkeypatch.setattr(dist, "all_reduce", reduced)
        monkeypatch.setattr(early_sums, "bucketed", partial(bucketed, bucket_bytes=130))


def train_and_log(declares: bool) -> Any:
    size = dist.get_world_size()
    places = Places(dist.get_rank(), size, GlooLink(dist.new_group(range(size)), dist.get_rank(), size))
    log = Log()
    with pytest.MonkeyPatch.context() as monkeypatch:
        log.note(monkeypatch)
        result = train("doubled", [1, 2], places, declares)[0]
    places.messages.close()
    return result, [*log]


@pytest.mark.parametrize("declares", [True, pytest.param(False, marks=pytest.mark.cluster)], ids=["1F1B", "GPipe"])
def test_replicas_send_the_first_gradients_before_the_last_are_computed(declares: bool) -> None:
    """The third of four steps has a smaller batch."""
    expected = on_one_device("doubled")
    for rank, (result, log) in enumerate(run_ranks(3, train_and_log, declares)):
        check_equal(result, expected)
        # The head's gradients are in one bucket, the convolution's bias and weight in one each. The first call with a
        # form of batch shows which parameters have gradients, and sums them afterwards.
        assert log[::9] == ([163, 163] if rank else []), (rank, log)
        for of_step in (log[1:9], log[10:]) if rank else ():
            assert of_step[:3] == ["gradient", "gradient", 15], (rank, log)
            assert [entry for entry in of_step[3:] if entry != "gradient"] == [4, 144, "end"], (rank, log)
