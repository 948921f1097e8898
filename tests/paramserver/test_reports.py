import pytest

from cnnstrategies.paramserver.reports import Reports

pytestmark = pytest.mark.light


def test_what_a_server_had_under_an_older_view_does_not_count_and_of_a_newer_one_it_counts_then() -> None:
    reports = Reports()
    reports.follow(3)
    reports.add(0, 3, {(7, 1)})
    reports.add(1, 2, {(7, 1)})
    assert reports.complete({0, 1}, 7, {1}) is None, "server 1 has not reported"
    for server in (0, 1):
        reports.add(server, 4, {(8, 1)})
    assert reports.complete({0, 1}, 8, {1}) is None
    reports.follow(4)
    assert reports.complete({0, 1}, 7, {1}) == set(), "every server reports anew"
    assert reports.complete({0, 1}, 8, {1}) == {1}
