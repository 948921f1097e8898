"""The servers of the parameters: whose gradients make up which step, and what of it outlives whom."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import test_changes
import test_clocks
import test_data_simulation
import test_shard
import test_sync
from mutants.faulty import replaces
from torch import Tensor

from cnnstrategies.paramserver.messages import Effects, Header, Kind
from cnnstrategies.paramserver.server.clocks import StaleClock, SyncClock
from cnnstrategies.paramserver.server.copies import Copies
from cnnstrategies.paramserver.server.pushes import Backlog, Begin
from cnnstrategies.paramserver.server.senders import Senders
from cnnstrategies.paramserver.server.server import Server
from cnnstrategies.paramserver.server.shard import Pull, Shard
from cnnstrategies.paramserver.server.store import Changes, Who
from cnnstrategies.paramserver.server.synchronous import Synchronous

HUNDRED_RUNS = test_data_simulation.test_nothing_is_violated


@replaces(Shard.pull, killed_by=HUNDRED_RUNS)
def a_worker_gets_values_without_its_own_push(
    right: Callable[[Shard, int, Iterable[int], Pull], None], self: Shard, worker: int, keys: Iterable[int], pull: Pull
) -> None:
    right(self, worker, keys, replace(pull, version=0, who=None))


@replaces(Server.on_message, killed_by=HUNDRED_RUNS)
def a_push_that_comes_again_is_applied_again(
    right: Callable[[Server, float, bytes, str, Header, memoryview], Effects],
    self: Server,
    now: float,
    route: bytes,
    user: str,
    header: Header,
    payload: memoryview,
) -> Effects:
    who, seen = (header.sender, header.incarnation), self.store.seen.get(header.key, {})
    if header.kind == Kind.PUSH and who in seen:
        seen[who] = min(seen[who], header.step - 1)
    return right(self, now, route, user, header, payload)


@replaces(StaleClock.may_start, killed_by=HUNDRED_RUNS)
def a_worker_runs_one_step_further_ahead_than_the_staleness(
    right: Callable[[StaleClock, int], bool], self: StaleClock, clock: int
) -> bool:
    return right(self, clock - 1)


@replaces(
    Synchronous.begin,
    killed_by=test_sync.test_accumulated_gradients_and_ssp_of_staleness_0_are_sync,
)
def workers_count_alike_whatever_their_number_of_samples(
    right: Callable[[Synchronous, Who, int, Begin], None], self: Synchronous, who: Who, step: int, begin: Begin
) -> None:
    right(self, who, step, replace(begin, weight=1.0))


@replaces(
    SyncClock.leave,
    killed_by=test_clocks.test_the_first_step_waits_for_all_workers_even_dead_ones,
)
def a_dead_worker_is_waited_for(right: Callable[[SyncClock, int], None], self: SyncClock, worker: int) -> None:
    pass


@replaces(Copies.safe, killed_by=test_shard.test_a_worker_sees_an_update_when_every_copy_has_it)
def a_worker_sees_what_one_death_can_take_back(
    right: Callable[[Copies, int, int], bool], self: Copies, key: int, version: int
) -> bool:
    return True


@replaces(Senders.asked, killed_by=HUNDRED_RUNS)
def what_one_server_has_missed_of_another_is_not_told_again(
    right: Callable[[Senders, int, int], bool], self: Senders, server: int, gaps: int
) -> bool:
    return False


@replaces(Backlog.forget_before, killed_by=HUNDRED_RUNS)
def pushes_are_kept_for_every_step(right: Callable[[Backlog, int], None], self: Backlog, step: int) -> None:
    pass


@replaces(Changes.apply, killed_by=test_changes.test_what_a_change_leaves_out_is_in_the_next)
def servers_do_not_count_what_workers_have(
    right: Callable[[Changes, int, memoryview, Tensor | None], None],
    self: Changes,
    key: int,
    payload: memoryview,
    change: Tensor | None,
) -> None:
    pass
