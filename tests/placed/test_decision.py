"""Where an operation runs, from the places of its operands."""

import pytest

from cnnstrategies.placed.decision import SeveralPlacesError, decide, is_at

A, B, BOTH = (0,), (1,), (0, 1)


@pytest.mark.light
@pytest.mark.parametrize(
    ("places", "written", "elements", "expected"),
    [
        ([None, None], "  ", [1, 1], None),  # all ranks have all operands
        ([A, None], "  ", [1, 99], A),  # where the placed operand is
        ([None, A], "  ", [99, 1], A),
        ([A, B], "  ", [5, 4], A),  # the larger operand stays
        ([A, B], "  ", [4, 5], B),
        ([A, B, A], "   ", [4, 5, 4], A),  # elements of one place are summed
        ([A, B], "  ", [4, 4], B),  # equal sizes: all ranks choose the same place
        ([A, B], "w ", [1, 99], A),  # the written operand stays
        ([None, A], "w ", [1, 99], None),  # a copy on all ranks is written on all ranks
        ([BOTH, B], "  ", [99, 1], B),  # a rank that has both
        ([(0, 1), (1, 2)], "  ", [9, 9], (1,)),
        ([(0, 1, 2), (1, 2)], "  ", [9, 9], (1, 2)),
        ([A, A], "ww", [1, 1], A),
    ],
)
def test_an_operation_runs_where_it_needs_the_smallest_messages(places, written, elements, expected):
    assert decide(places, [mark == "w" for mark in written], elements.__getitem__) == expected


@pytest.mark.light
def test_an_operation_that_writes_at_several_places_has_no_place():
    with pytest.raises(SeveralPlacesError):
        decide([A, B], [True, True], lambda _: 1)
    with pytest.raises(SeveralPlacesError):
        decide([None, B], [True, True], lambda _: 1)


@pytest.mark.light
@pytest.mark.parametrize(
    ("place", "ranks", "expected"),
    [
        (None, A, True),
        (None, None, True),
        (A, A, True),
        (BOTH, A, True),
        (A, BOTH, False),
        (A, B, False),
        (A, None, False),
    ],
)
def test_a_tensor_is_at_ranks_that_all_have_a_copy(place, ranks, expected):
    assert is_at(place, ranks) == expected
