"""Every sample of an epoch is given out once, and again if the worker that had it died."""

import random

import pytest

from cnnstrategies.paramserver.coordinator import dispatch
from cnnstrategies.paramserver.coordinator.dispatch import Speeds, digits, places
from cnnstrategies.paramserver.core.node import ControlError

pytestmark = pytest.mark.light


class Dispatcher(dispatch.Dispatcher):
    """Every question is a new one."""

    asked = 0

    def take(self, *args, now=0.0):
        self.asked += 1
        return super().take(*args, self.asked, now)


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


def epochs(seconds, chunks, ahead=0, number=2, pause=0.0):
    """Epochs of workers that need so many seconds for a chunk, and take some ahead: ends, and chunks by worker.

    Each has a loader that is asked for the next chunk when one is worked off.
    """
    dispatcher, workers, now, ends, counts = Dispatcher(), range(len(seconds)), 0.0, [], []
    for epoch in range(number):
        dispatcher.begin(epoch, chunks, 1)
        held, done, open_to = [0] * len(seconds), [0] * len(seconds), set(workers)
        ready = dict.fromkeys(workers, now)
        while ready:
            worker = min(ready, key=lambda one: (ready[one], one))
            now = ready.pop(worker)
            if held[worker]:
                held[worker] -= 1
                done[worker] += 1
            while worker in open_to and held[worker] <= ahead:
                if dispatcher.take(worker, epoch, done[worker], workers, now=now):
                    held[worker] += 1
                else:
                    open_to.discard(worker)
            if held[worker]:
                ready[worker] = now + seconds[worker]
        ends.append(now)
        counts.append(done)
        now += pause
    return ends, counts


def test_the_end_of_an_epoch_is_left_to_those_who_are_there_first():
    """With the speeds of one epoch the next takes no longer than the best division, and one chunk of the fastest."""
    for seconds, ahead in (((1.0, 4.0), 0), ((1.0, 4.0), 4), ((1.0, 1.0, 7.0), 2), ((1.0, 2.0, 3.0, 10.0), 3)):
        ends, counts = epochs(seconds, 40, ahead, pause=100.0)
        best = 40 / sum(1 / one for one in seconds)
        assert [sum(one) for one in counts] == [40, 40]
        assert ends[1] - ends[0] - 100.0 <= best + 1.0, (seconds, ahead)


def test_workers_of_one_speed_get_as_many_and_one_is_left_no_chunk_by_another():
    for ahead in (0, 3):
        assert epochs((1.0, 1.0), 40, ahead)[1] == [[20, 20], [20, 20]]
    # The slow one's first is its only one, though the fast one could do all others meanwhile.
    assert epochs((1.0, 100.0), 10, number=1)[1] == [[9, 1]]


def test_what_a_fast_worker_leaves_behind_is_given_to_a_slow_one_that_asks():
    dispatcher = Dispatcher()
    dispatcher.begin(0, 7, 1)
    for worker, processed, now in ((0, 0, 0.0), (1, 0, 0.0), (0, 1, 1.0), (0, 2, 2.0), (0, 3, 3.0)):
        assert dispatcher.take(worker, 0, processed, (0, 1), now=now)
    assert not dispatcher.take(1, 0, 1, (0, 1), now=3.5), "one lasts 3.5 s: the other does both until then"
    dispatcher.lose(0)
    left = [dispatcher.take(1, 0, processed, (1,), now=4.0) for processed in (1, 2, 3)]
    assert positions(left) == [(0, 4), (0, 5), (0, 6)]


def test_a_speed_is_that_of_the_last_intervals_without_what_lies_between_epochs():
    speeds = Speeds()
    assert speeds.of(0) is None
    speeds.heard(0, 0, 0, 0.0)
    assert speeds.of(0) is None
    speeds.heard(0, 1, 0, 100.0)
    speeds.heard(0, 1, 2, 101.0)
    assert speeds.of(0) == 2.0
    speeds.heard(0, 2, 0, 300.0)
    for second in range(1, 20):
        speeds.heard(0, 2, 5 * second, 300.0 + second)
    assert speeds.of(0) == pytest.approx(5.0, rel=0.01)
    speeds.forget(0)
    assert speeds.of(0) is None


def test_batches_are_not_left_to_a_worker_that_takes_no_more():
    dispatcher = Dispatcher()
    dispatcher.begin(0, 5, 1)
    for worker, processed, now in ((0, 0, 0.0), (1, 0, 0.0), (1, 1, 1.0), (1, 2, 2.0)):
        assert dispatcher.take(worker, 0, processed, (0, 1, 2), now=now)
    assert not dispatcher.take(1, 0, 3, (0, 1, 2), now=3.0), "the last is for the third, which dies"
    assert dispatcher.take(0, 0, 1, (0, 1), now=4.0)


def test_batches_are_not_left_to_a_worker_that_should_have_asked_long_ago():
    for now, size in ((3.5, 0), (5.5, 1)):
        dispatcher = Dispatcher()
        dispatcher.begin(0, 6, 1)
        for worker, processed, at in ((0, 0, 0.0), (1, 0, 0.0), (1, 1, 1.0), (1, 2, 2.0)):
            assert dispatcher.take(worker, 0, processed, (0, 1), now=at)
        assert len(dispatcher.take(0, 0, 1, (0, 1), now=now)) == size


def test_batches_are_not_left_to_a_worker_that_has_joined_and_may_leave():
    for workers, size in (((0, 1), 0), ((0,), 1)):
        dispatcher = Dispatcher()
        dispatcher.begin(0, 6, 1)
        for worker, processed, now in ((0, 0, 0.0), (1, 0, 0.0), (1, 1, 1.0), (1, 2, 2.0)):
            assert dispatcher.take(worker, 0, processed, workers, now=now)
        assert len(dispatcher.take(0, 0, 1, workers, now=3.5)) == size


def test_an_epoch_goes_on_without_what_was_worked_on_before_the_checkpoint():
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
