"""Every sample of an epoch is given out once, and again if the worker that had it died."""

import random

import pytest

from cnnstrategies.paramserver.coordinator import dispatch
from cnnstrategies.paramserver.coordinator.dispatch import digits, places
from cnnstrategies.paramserver.core.node import ControlError

pytestmark = pytest.mark.light


class Dispatcher(dispatch.Dispatcher):
    """Every question is a new one."""

    asked = 0

    def take(self, *args):
        self.asked += 1
        return super().take(*args, self.asked)


def positions(chunks):
    return sorted((chunk.epoch, i) for chunk in chunks for i in range(chunk.start, chunk.stop))


def test_what_a_dead_worker_had_not_processed_is_given_out_again():
    for seed in range(50):
        generator = random.Random(seed)
        dispatcher = Dispatcher()
        dispatcher.begin(0, 100, 3)
        mine, other = [], []
        processed = 0
        for _ in range(generator.randrange(1, 12)):
            mine.append(dispatcher.take(0, 0, processed, (0, 1)))
            processed = generator.randint(processed, sum(map(len, mine)))
            other.append(dispatcher.take(1, 0, sum(map(len, other)), (0, 1)))
        dispatcher.lose(0)
        while chunk := dispatcher.take(1, 0, sum(map(len, other)), (1,)):
            other.append(chunk)
        seen = set(positions(other))

        # Only whole chunks that it had processed before it last asked may be missing.
        missing = set(positions(mine)) - seen
        assert len(missing) <= processed
        assert seen | missing == {(0, i) for i in range(100)}
        assert len(positions(other)) == len(set(positions(other)))


def test_an_epoch_that_is_over_does_not_begin_again():
    """For a worker that is started again begins to load the first epoch, before it hears where the others are."""
    dispatcher = Dispatcher()
    for epoch in range(4):
        dispatcher.begin(epoch, 4, 2)
        assert positions(dispatcher.take(0, epoch, processed, (0,)) for processed in (0, 2)) == [
            (epoch, i) for i in range(4)
        ]
    dispatcher.begin(0, 4, 2)
    assert not dispatcher.take(1, 0, 0, (0, 1))
    dispatcher.begin(4, 4, 2)
    assert positions(dispatcher.take(0, 4, processed, (0,)) for processed in (0, 2, 4)) == [(4, i) for i in range(4)]


def test_every_worker_gets_a_chunk_however_slow():
    dispatcher = Dispatcher()
    dispatcher.begin(0, 10, 1)
    assert all(dispatcher.take(0, 0, done, (0, 1)) for done in range(9))
    assert not dispatcher.take(0, 0, 9, (0, 1))
    assert dispatcher.take(1, 0, 0, (0, 1)).start == 9
    assert not dispatcher.take(1, 0, 1, (0, 1))


def test_an_epoch_goes_on_without_what_was_done_before_its_save():
    before, after = Dispatcher(), Dispatcher()
    before.begin(3, 11, 2)
    for worker in (0, 1, 0, 1):
        before.take(worker, 3, 0, (0, 1))
    before.processed(0, 3, 4)
    before.processed(1, 3, 2)
    done = before.progress(3)
    after.begin(3, 11, 2, done)
    rest = [after.take(0, 3, 0, (0,)).start for _ in range(3)]
    assert rest == [6, 8, 10], "worker 1 had taken the fourth chunk, and not worked on it"
    assert not after.take(0, 3, 0, (0,))
    assert after.progress(3) == done
    after.processed(0, 3, 5)
    assert int(after.progress(3), 16) == 0b111111
    assert after.samples(3) == 11
    assert after.progress(4) == ""


def test_what_is_no_number_is_refused_as_what_is_done():
    run = dispatch.Dispatcher()
    with pytest.raises(ControlError, match="hexadecimal digits, not as 'zz'"):
        run.begin(0, 4, 1, "zz")
    run.begin(0, 4, 1, "")
    assert run.progress(0) == "0"
    assert places(digits([0, 9, 70])) == [0, 9, 70]
