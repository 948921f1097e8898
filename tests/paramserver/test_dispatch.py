"""Dispatch of chunks: every sample of an epoch is given out once, and again if the sample's worker dies."""

import random

import pytest

from cnnstrategies.paramserver.coordinator import dispatch
from cnnstrategies.paramserver.coordinator.dispatch import Chunk
from cnnstrategies.paramserver.core.node import ControlError

pytestmark = pytest.mark.light


class Dispatcher(dispatch.Dispatcher):
    """A dispatcher that treats every request as a new request."""

    asked = 0

    def take(self, *args):
        self.asked += 1
        return super().take(*args, self.asked)


def begun(samples: int, chunk: int = 1) -> Dispatcher:
    dispatcher = Dispatcher()
    dispatcher.begin(0, samples, chunk)
    return dispatcher


def positions(chunks: list[Chunk]) -> list[tuple[int, int]]:
    return sorted((chunk.epoch, i) for chunk in chunks for i in range(chunk.start, chunk.stop))


@pytest.mark.parametrize("leaves", [False, True])
def test_unprocessed_chunks_of_a_lost_worker_go_to_other_workers(leaves: bool) -> None:
    """Check a worker that leaves, which reports its progress, and one that dies, whose last request tells it."""
    for seed in range(50):
        generator = random.Random(seed)
        dispatcher = begun(100, 3)
        mine: list[Chunk] = []
        other: list[Chunk] = []
        processed = reported = 0
        for _ in range(generator.randrange(1, 12)):
            reported = processed
            mine.append(dispatcher.take(0, 0, reported, (0, 1)))
            processed = generator.randint(processed, sum(map(len, mine)))
            other.append(dispatcher.take(1, 0, sum(map(len, other)), (0, 1)))
        if leaves:
            reported = processed
            dispatcher.processed(0, 0, reported)
        dispatcher.lose(0)
        while chunk := dispatcher.take(1, 0, sum(map(len, other)), (1,)):
            other.append(chunk)
        done = [chunk for place, chunk in enumerate(mine) if sum(map(len, mine[: place + 1])) <= reported]
        assert positions(done + other) == [(0, i) for i in range(100)]


def test_an_epoch_that_is_over_does_not_begin_again():
    """Check old epochs: a restarted worker begins with the first epoch before it learns the others' epoch."""
    dispatcher = Dispatcher()
    for epoch in range(4):
        dispatcher.begin(epoch, 4, 2)
        taken = [dispatcher.take(0, epoch, processed, (0,)) for processed in (0, 2)]
        assert positions(taken) == [(epoch, i) for i in range(4)]
    dispatcher.begin(0, 4, 2)
    assert not dispatcher.take(1, 0, 0, (0, 1))
    dispatcher.begin(4, 4, 2)
    assert positions([dispatcher.take(0, 4, processed, (0,)) for processed in (0, 2, 4)]) == [(4, i) for i in range(4)]


def test_every_worker_gets_a_chunk_however_slow():
    dispatcher = begun(10)
    assert all(dispatcher.take(0, 0, done, (0, 1)) for done in range(9))
    assert not dispatcher.take(0, 0, 9, (0, 1))
    assert dispatcher.take(1, 0, 0, (0, 1)).start == 9
    assert not dispatcher.take(1, 0, 1, (0, 1))


def test_a_resumed_epoch_leaves_out_the_samples_processed_before_the_save():
    before, after = Dispatcher(), Dispatcher()
    before.begin(3, 11, 2)
    for worker in (0, 1, 0, 1):
        before.take(worker, 3, 0, (0, 1))
    before.processed(0, 3, 4)
    before.processed(1, 3, 2)
    done = before.progress(3)
    after.begin(3, 11, 2, done)
    rest = [after.take(0, 3, 0, (0,)).start for _ in range(3)]
    assert rest == [6, 8, 10], "worker 1 had taken the fourth chunk, but not processed it"
    assert not after.take(0, 3, 0, (0,))
    assert after.progress(3) == done
    after.processed(0, 3, 5)
    assert int(after.progress(3), 16) == 0b111111
    assert after.begin(3, 5, 1) == 11, "an epoch keeps the number of samples with which it began first"
    assert after.progress(4) == ""
    with pytest.raises(ControlError, match="done='zz' is not a number in hexadecimal digits"):
        after.begin(4, 4, 1, "zz")


# Workers that come while others train


def test_a_joiner_gets_only_chunks_that_the_workers_can_spare():
    dispatcher = begun(3)
    assert dispatcher.can_spare((0, 1), others=True)
    assert len(dispatcher.take(5, 0, 0, (0, 1))) == 1
    assert not dispatcher.can_spare((0, 1), others=True)
    assert not dispatcher.take(5, 0, 0, (0, 1))
    assert dispatcher.take(0, 0, 0, (0, 1))
    assert dispatcher.take(1, 0, 0, (0, 1))


def test_a_returning_worker_counts_among_the_workers_that_need_a_chunk():
    dispatcher = begun(3)
    dispatcher.mark_boundary()
    for _ in range(2):
        dispatcher.take(0, 0, 0, (0,))
    assert dispatcher.may_join(1)
    assert dispatcher.can_spare((0, 1), others=False)
    assert not dispatcher.can_spare((0, 1, 2), others=False), "there is one chunk for two workers"
    assert not dispatcher.can_spare((0, 1), others=True)


def test_a_worker_that_found_no_chunk_left_is_not_let_in():
    dispatcher = begun(2)
    dispatcher.mark_boundary()
    for worker in (0, 0, 2):
        dispatcher.take(worker, 0, 0, (0, 2))
    assert not dispatcher.take(1, 0, 0, (0, 2))
    dispatcher.lose(2)  # Now a chunk is left after all.
    assert dispatcher.can_spare((0, 1), others=False)
    assert not dispatcher.may_join(1)
    assert dispatcher.may_join(3)


def test_a_chunk_lost_after_its_epoch_is_given_out_in_the_next_epoch():
    dispatcher = begun(2)
    left = dispatcher.take(1, 0, 0, (0, 1))
    dispatcher.take(0, 0, 0, (0, 1))
    dispatcher.begin(1, 2, 1)
    dispatcher.lose(1)
    assert dispatcher.take(0, 1, 0, (0,)) == left
