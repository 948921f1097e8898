"""The parameter server's control plane in virtual time: who is a member, what all agree on, who loads which batches."""

import itertools
import zlib

import test_coordinator
import test_dispatch
import test_restart
import test_simulation
from mutants.faulty import removes, replaces
from simulation.toys import Sheet

from cnnstrategies.paramserver.coordinator.collective_rounds import Rounds
from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.dispatch import Dispatcher
from cnnstrategies.paramserver.coordinator.journal import HEAD, Journaled, _records
from cnnstrategies.paramserver.coordinator.roster import Roster
from cnnstrategies.paramserver.core.node import Send
from cnnstrategies.paramserver.core.requests import UNKNOWN, Asking
from cnnstrategies.paramserver.drivers.coordinator import JournalFile

GONE = test_dispatch.test_what_one_that_is_gone_had_not_processed_is_anothers
HUNDRED_RUNS = test_simulation.test_nothing_is_violated
_new = itertools.count(1 << 20)

# Messages that are lost


@replaces(Asking.on_reply, killed_by=HUNDRED_RUNS)
def a_request_that_never_came_or_whose_answer_was_lost_is_not_sent_again(right, self, now, message):
    request, effects = right(self, now, message)
    return request, [] if message.kind == UNKNOWN else effects


@replaces(Coordinator.on_message, killed_by=HUNDRED_RUNS)
def who_has_missed_a_view_is_not_told_again(right, self, now, sender, message):
    effects = right(self, now, sender, message)
    told = [one for one in effects if isinstance(one, Send) and (one.to, one.message.kind) == (sender, "view")]
    return [one for one in effects if message.kind != "beat" or one not in told]


# Members


@replaces(Roster.check_members, killed_by=HUNDRED_RUNS)
def who_is_silent_stays_a_member(right, self, now, over, view, waited):
    for member in () if over else self.members:
        member.seen = now
    right(self, now, over, view, waited)


removes(Roster.not_seen, "workers begin before all servers know them", killed_by=HUNDRED_RUNS, gives=[])


# Batches


removes(
    Dispatcher.lose,
    "batches of a dead worker are nobodys",
    killed_by=GONE,
    leaves=False,
)


@replaces(Dispatcher.take, killed_by=HUNDRED_RUNS)
def batches_that_are_asked_for_again_are_others(right, self, worker, number, processed, workers, ordinal):
    return right(self, worker, number, processed, workers, next(_new))


removes(
    Dispatcher.processed,
    "who leaves does not say how far it has come",
    killed_by=GONE,
    leaves=True,
)


# A coordinator that follows one that was killed


@replaces(Journaled.on_timer, killed_by=HUNDRED_RUNS)
def what_a_timer_has_changed_is_not_written_down(right, self, now, name):
    return self.coordinator.on_timer(now, name)


@replaces(Sheet.replace, killed_by=HUNDRED_RUNS)
def what_follows_half_a_record_is_lost(right, self, contents):
    if not self.read().startswith(contents):
        right(self, contents)


@replaces(_records, killed_by=test_restart.test_a_record_with_a_changed_byte_was_said_to_nobody, where=-5)
def a_record_with_a_changed_byte_counts(right, contents):
    start, signed = 0, b""
    while start < len(contents):
        body = contents[start + HEAD.size :][: HEAD.unpack_from(contents, start)[0]]
        signed += HEAD.pack(len(body), zlib.crc32(body)) + body
        start += HEAD.size + len(body)
    return right(signed)


@replaces(Coordinator.start, killed_by=test_restart.test_the_time_without_a_coordinator_is_nobodys_silence)
def the_time_without_a_coordinator_is_the_others_silence(right, self, now):
    if self._last_time is not None:
        self._last_time = now
    return right(self, now)


@replaces(JournalFile.replace, killed_by=test_restart.test_a_file_is_its_users_alone_and_written_anew_as_a_whole)
def a_journal_is_written_anew_in_its_place(right, self, contents):
    self._path.write_bytes(b"")
    right(self, contents)


removes(
    Rounds.deadlock,
    "who has ended its epoch is waited for without end",
    killed_by=test_coordinator.test_a_worker_that_needs_those_who_wait_for_it_ends_the_run,
    gives=[],
)


@replaces(Roster.admit, killed_by=test_coordinator.test_a_server_that_training_did_not_wait_for_is_filled, dies=True)
def a_server_that_training_has_begun_without_counts_as_one_of_the_first(right, self, now, peer, hello):
    self.lost_servers.discard(peer.id)
    return right(self, now, peer, hello)
