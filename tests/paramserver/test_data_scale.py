"""What a process does and keeps does not grow with the number of steps, and with that of others only as it must."""

import pytest
from simulation.data.scale import count

from cnnstrategies.paramserver.server import clocks

pytestmark = pytest.mark.light


@pytest.mark.parametrize(("workers", "servers"), [(3, 2), (12, 4)])
def test_a_server_gets_three_messages_of_each_worker_in_a_step(workers: int, servers: int) -> None:
    leader, *others = count(workers, servers, 10).received
    own = 3 * workers  # Each begins, pushes the one slice that is here, and pulls it.
    assert own <= leader <= own + servers, "and one vote of each other server"
    assert all(own <= one <= own + 2 for one in others), "and one decision"


def test_nothing_grows_with_the_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "LOGGED", 5)
    _, second, *_, last = count(2, 2, 100).kept
    assert last <= second
