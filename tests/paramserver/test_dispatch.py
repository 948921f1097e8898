"""Every sample of an epoch is given out once, and again if the worker that had it died."""

import random

import pytest

from cnnstrategies.paramserver.coordinator import dispatch

pytestmark = pytest.mark.light


class Dispatcher(dispatch.Dispatcher):
    """Every question is a new one."""

    asked = 0

    def take(self, *args):
        self.asked += 1
        return super().take(*args, self.asked)


def test_a_question_that_is_asked_again_is_answered_the_same():
    dispatcher = dispatch.Dispatcher()
    dispatcher.begin(0, 10, 4)
    first = dispatcher.take(0, 0, 0, (0,), 1)
    assert dispatcher.take(0, 0, 0, (0,), 1) == first
    rest = [dispatcher.take(0, 0, 0, (0,), ordinal) for ordinal in (2, 2, 3, 3, 4)]
    assert [(chunk.start, chunk.stop) for chunk in rest] == [(4, 8), (4, 8), (8, 10), (8, 10), (0, 0)]


def positions(chunks):
    return sorted((chunk.epoch, i) for chunk in chunks for i in range(chunk.start, chunk.stop))


def test_each_sample_goes_to_one_worker_whatever_the_order():
    for seed in range(50):
        generator = random.Random(seed)
        dispatcher, workers = Dispatcher(), range(4)
        samples, chunk = generator.randrange(40, 200), generator.randrange(1, 9)
        dispatcher.begin(3, samples, chunk)
        got = {worker: [] for worker in workers}
        open_to = set(workers)
        while open_to:
            worker = generator.choice(sorted(open_to))
            processed = sum(map(len, got[worker][:-1]))
            taken = dispatcher.take(worker, 3, processed, workers)
            if taken:
                got[worker].append(taken)
            else:
                open_to.discard(worker)
        assert positions([chunk for chunks in got.values() for chunk in chunks]) == [(3, i) for i in range(samples)]
        assert all(got.values())


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


def test_what_is_left_at_the_end_of_an_epoch_comes_first_in_the_next():
    dispatcher = Dispatcher()
    dispatcher.begin(0, 4, 2)
    first, second = dispatcher.take(0, 0, 0, (0, 1)), dispatcher.take(1, 0, 0, (0, 1))
    assert not dispatcher.take(1, 0, 2, (0, 1))
    dispatcher.lose(0)
    dispatcher.begin(1, 4, 2)
    again = [dispatcher.take(1, 1, processed, (1,)) for processed in (0, 2, 4, 6)]
    assert positions(again) == positions([first]) + [(1, i) for i in range(4)]
    assert positions([second]) == [(0, 2), (0, 3)]


def test_beginning_twice_changes_nothing():
    dispatcher = Dispatcher()
    dispatcher.begin(0, 4, 2)
    dispatcher.take(0, 0, 0, (0,))
    dispatcher.begin(0, 4, 2)
    assert positions([dispatcher.take(0, 0, 2, (0,))]) == [(0, 2), (0, 3)]
    assert not dispatcher.take(0, 0, 4, (0,))
    assert not dispatcher.take(0, 7, 0, (0,))


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
