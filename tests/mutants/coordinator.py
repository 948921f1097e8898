"""The parameter server's control plane in virtual time: who is a member, what all agree on, who loads which batches."""

import itertools
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import test_coordinator
import test_dispatch
import test_join
import test_restart
import test_simulation
from mutants.faulty import replaces
from simulation.toys import Sheet

from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.dispatch import Chunk, Dispatcher
from cnnstrategies.paramserver.coordinator.journal import HEAD, Journaled, _records
from cnnstrategies.paramserver.coordinator.roster import Roster
from cnnstrategies.paramserver.coordinator.watchdog import Wait, behind
from cnnstrategies.paramserver.core.node import Effects, Message, Peer, Send
from cnnstrategies.paramserver.core.requests import HELD, UNKNOWN, Answering, Asking, Request
from cnnstrategies.paramserver.drivers.coordinator import JournalFile

HUNDRED_RUNS = test_simulation.test_nothing_is_violated
_new = itertools.count(1 << 20)

# Messages that are lost


@replaces(Asking.on_reply, killed_by=HUNDRED_RUNS)
def a_request_that_never_came_is_not_sent_again(
    right: Callable[[Asking, float, Message], tuple[Request | None, Effects]],
    self: Asking,
    now: float,
    message: Message,
) -> tuple[Request | None, Effects]:
    request, effects = right(self, now, message)
    return request, [] if message.kind == UNKNOWN else effects


@replaces(Answering.probe, killed_by=HUNDRED_RUNS)
def an_answer_that_was_lost_is_not_sent_again(
    right: Callable[[Answering, Peer, Message, Callable[[Peer, int], Sequence[str]]], Effects],
    self: Answering,
    sender: Peer,
    message: Message,
    blames: Callable[[Peer, int], Sequence[str]],
) -> Effects:
    effects = right(self, sender, message, blames)
    return [one for one in effects if isinstance(one, Send) and one.message.kind in (HELD, UNKNOWN)]


@replaces(Coordinator.on_message, killed_by=HUNDRED_RUNS)
def who_has_missed_a_view_is_not_told_again(
    right: Callable[[Coordinator, float, Peer, Message], Effects],
    self: Coordinator,
    now: float,
    sender: Peer,
    message: Message,
) -> Effects:
    effects = right(self, now, sender, message)
    told = [one for one in effects if isinstance(one, Send) and (one.to, one.message.kind) == (sender, "view")]
    return [one for one in effects if message.kind != "beat" or one not in told]


# Members


@replaces(Roster.look, killed_by=HUNDRED_RUNS)
def who_is_silent_stays_a_member(
    right: Callable[[Roster, float, bool, tuple[int, list[str]]], None],
    self: Roster,
    now: float,
    over: bool,
    overdue: tuple[int, list[str]],
) -> None:
    for member in () if over else self.members:
        member.seen = now
    right(self, now, over, overdue)


@replaces(Roster.not_seen, killed_by=HUNDRED_RUNS)
def workers_begin_before_all_servers_know_them(
    right: Callable[[Roster, int], list[str]], self: Roster, number: int
) -> list[str]:
    return []


# Batches


@replaces(Dispatcher.lose, killed_by=test_dispatch.test_what_a_dead_worker_had_not_processed_is_given_out_again)
def batches_of_a_dead_worker_are_nobodys(
    right: Callable[[Dispatcher, int], None], self: Dispatcher, worker: int
) -> None:
    pass


@replaces(Dispatcher.take, killed_by=HUNDRED_RUNS)
def batches_that_are_asked_for_again_are_others(
    right: Callable[[Dispatcher, int, int, int, Collection[int], int], Chunk],
    self: Dispatcher,
    worker: int,
    number: int,
    processed: int,
    workers: Collection[int],
    ordinal: int,
) -> Chunk:
    return right(self, worker, number, processed, workers, next(_new))


@replaces(Dispatcher.processed, killed_by=test_join.test_unfinished_chunks_of_a_leaver_go_to_another)
def who_leaves_does_not_say_how_far_it_has_come(
    right: Callable[[Dispatcher, int, int, int], None], self: Dispatcher, worker: int, number: int, processed: int
) -> None:
    pass


# A coordinator that follows one that was killed


@replaces(Journaled.on_timer, killed_by=HUNDRED_RUNS)
def what_a_timer_has_changed_is_not_written_down(
    right: Callable[[Journaled, float, str], Effects], self: Journaled, now: float, name: str
) -> Effects:
    return self.coordinator.on_timer(now, name)


@replaces(Sheet.replace, killed_by=HUNDRED_RUNS)
def what_follows_half_a_record_is_lost(right: Callable[[Sheet, bytes], None], self: Sheet, contents: bytes) -> None:
    if not self.read().startswith(contents):
        right(self, contents)


@replaces(_records, killed_by=test_restart.test_a_record_with_a_changed_byte_was_said_to_nobody, where=-5)
def a_record_with_a_changed_byte_counts(
    right: Callable[[bytes], Iterator[tuple[Any, int]]], contents: bytes
) -> Iterator[tuple[Any, int]]:
    start, signed = 0, b""
    while start < len(contents):
        body = contents[start + HEAD.size :][: HEAD.unpack_from(contents, start)[0]]
        signed += HEAD.pack(len(body), zlib.crc32(body)) + body
        start += HEAD.size + len(body)
    return right(signed)


@replaces(Coordinator.start, killed_by=test_restart.test_the_time_without_a_coordinator_is_nobodys_silence)
def the_time_without_a_coordinator_is_the_others_silence(
    right: Callable[[Coordinator, float], Effects], self: Coordinator, now: float
) -> Effects:
    if self._looked is not None:
        self._looked = now
    return right(self, now)


@replaces(JournalFile.replace, killed_by=test_restart.test_a_file_is_written_anew_as_a_whole_or_not_at_all)
def a_journal_is_written_anew_in_its_place(
    right: Callable[[JournalFile, bytes], None], self: JournalFile, contents: bytes
) -> None:
    self._path.write_bytes(b"")
    right(self, contents)


@replaces(behind, killed_by=test_coordinator.test_a_worker_that_needs_those_who_wait_for_it_ends_the_run)
def who_has_ended_its_epoch_is_waited_for_without_end(
    right: Callable[[Collection[int], Collection[int], Mapping[int, Mapping[str, float]]], list[Wait]],
    waiting: Collection[int],
    others: Collection[int],
    figures: Mapping[int, Mapping[str, float]],
) -> list[Wait]:
    return []


@replaces(
    Roster.admit,
    killed_by=test_coordinator.test_a_server_that_training_did_not_wait_for_is_filled,
    dies=True,
)
def a_server_that_training_has_begun_without_counts_as_one_of_the_first(
    right: Callable[[Roster, float, Peer, Message], bool], self: Roster, now: float, peer: Peer, hello: Message
) -> bool:
    self.lost_servers.discard(peer.id)
    return right(self, now, peer, hello)
