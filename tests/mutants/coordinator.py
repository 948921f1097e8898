"""Mutants of the parameter server's control plane in virtual time: membership, decisions and division of batches."""

import itertools
import zlib

from cnnstrategies.paramserver.coordinator.collective_rounds import Rounds
from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.dispatch import Dispatcher
from cnnstrategies.paramserver.coordinator.journal import HEAD, Journaled, _records
from cnnstrategies.paramserver.coordinator.places import PLACE
from cnnstrategies.paramserver.coordinator.roster import Roster
from cnnstrategies.paramserver.core.node import Liveness, Send
from cnnstrategies.paramserver.core.requests import UNKNOWN, Asking
from cnnstrategies.paramserver.drivers.coordinator import JournalFile
from tests.mutants.faulty import removes, replaces
from tests.paramserver import test_coordinator, test_dispatch, test_restart, test_simulation
from tests.paramserver.simulation.toys import MemoryJournal

GONE = test_dispatch.test_unprocessed_chunks_of_a_lost_worker_go_to_other_workers
HUNDRED_RUNS = test_simulation.test_no_simulated_run_of_the_coordinator_violates_an_invariant
_new = itertools.count(1 << 20)

# Lost messages


@replaces(Asking.on_reply, killed_by=HUNDRED_RUNS)
def a_lost_request_or_a_request_with_a_lost_reply_is_not_sent_again(original, self, now, message):
    request, effects = original(self, now, message)
    return request, [] if message.kind == UNKNOWN else effects


@replaces(Coordinator.on_message, killed_by=HUNDRED_RUNS)
def a_member_that_missed_a_view_does_not_get_it_again(original, self, now, sender, message):
    effects = original(self, now, sender, message)
    views = [effect for effect in effects if isinstance(effect, Send) and effect.to == sender]
    views = [effect for effect in views if effect.message.kind == "view"]
    return [effect for effect in effects if message.kind != "beat" or effect not in views]


# Members


@replaces(Roster.check_members, killed_by=HUNDRED_RUNS)
def a_silent_member_is_not_removed(original, self, over, view, waited):
    for member in () if over else self.members:
        self.liveness.hear(member.peer)
    original(self, over, view, waited)


removes(Roster.not_seen, "workers begin before all servers know them", killed_by=HUNDRED_RUNS, gives=[])


# Batches


removes(
    Dispatcher.lose,
    "batches of a dead worker are not given to other workers",
    killed_by=GONE,
    leaves=False,
)


@replaces(Dispatcher.take, killed_by=HUNDRED_RUNS)
def a_repeated_request_for_batches_gets_different_batches(original, self, worker, number, processed, workers, ordinal):
    return original(self, worker, number, processed, workers, next(_new))


removes(
    Dispatcher.processed,
    "a leaving worker does not report its last processed batch",
    killed_by=GONE,
    leaves=True,
)


# A coordinator that replaces a killed coordinator


@replaces(Journaled.on_timer, killed_by=HUNDRED_RUNS)
def changes_by_a_timer_are_not_written_to_the_journal(original, self, now, name):
    return self.coordinator.on_timer(now, name)


@replaces(MemoryJournal.replace, killed_by=HUNDRED_RUNS)
def records_after_an_incomplete_record_are_lost(original, self, contents):
    if not self.read().startswith(contents):
        original(self, contents)


@replaces(_records, killed_by=test_restart.test_a_last_record_with_a_changed_byte_is_ignored, where=-5)
def a_record_with_a_changed_byte_is_replayed(original, contents):
    start, signed = 0, b""
    while start < len(contents):
        body = contents[start + HEAD.size :][: HEAD.unpack_from(contents, start)[0]]
        signed += HEAD.pack(len(body), zlib.crc32(body)) + body
        start += HEAD.size + len(body)
    return original(signed)


@replaces(Liveness.pass_to, killed_by=test_restart.test_the_time_without_a_coordinator_does_not_count_as_silence)
def time_without_a_coordinator_counts_as_silence_of_the_members(original, self, now):
    self._pass_to(now)


@replaces(JournalFile.replace, killed_by=test_restart.test_a_journal_file_is_private_and_replaced_atomically)
def a_journal_is_rewritten_in_place(original, self, contents):
    self._path.write_bytes(b"")
    original(self, contents)


removes(
    Rounds.deadlock,
    "workers wait without end for a worker that has ended its epoch",
    killed_by=test_coordinator.test_workers_that_wait_for_each_other_end_the_run,
    gives=[],
)


@replaces(Roster.admit, killed_by=test_coordinator.test_a_server_that_training_did_not_wait_for_gets_copies, dies=True)
def a_server_that_registers_after_training_began_counts_as_a_first_server(original, self, peer, hello):
    if self._places[peer.role, peer.id].is_awaited:
        self._places[peer.role, peer.id].state = PLACE.start
    return original(self, peer, hello)
