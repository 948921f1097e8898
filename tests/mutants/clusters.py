"""Mutants of cluster runs: a restarted run resumes from its own last checkpoint, and restarts are limited."""

import contextlib
from dataclasses import replace

from torch.distributed import TCPStore

from cnnstrategies.cluster.claimed_processes import check_processes
from cnnstrategies.cluster.handshake import Door
from cnnstrategies.cluster.job import sbatch_script
from cnnstrategies.cluster.job_files import JobFiles
from cnnstrategies.cluster.lease import Lease
from cnnstrategies.cluster.rendezvous import ranks_meet
from cnnstrategies.cluster.run_folder import refuse_anothers
from cnnstrategies.cluster.run_owner import Observation, Owner, State
from cnnstrategies.cluster.search import RankZeroSearch
from cnnstrategies.cluster.stores import LOOPBACK, serve_on_loopback
from cnnstrategies.commands.run.ownership import own_version, owns_folders
from tests.cluster import (
    test_handshake,
    test_job,
    test_job_files,
    test_lease,
    test_loopback,
    test_platforms,
    test_rendezvous,
    test_run_folder,
)
from tests.commands import test_ownership
from tests.mutants.faulty import removes, replaces


@replaces(sbatch_script, killed_by=test_job.test_warned_and_preempted_jobs_are_requeued_and_failed_jobs_are_not)
def a_job_is_requeued_more_often_than_max_requeues_allows(
    original, options, size, files, python, command, goes_on=False
):
    options = replace(options, max_requeues=options.max_requeues + 1)
    return original(options, size, files, python, command, goes_on)


removes(
    refuse_anothers,
    "a run resumes from the checkpoint of another run",
    killed_by=test_run_folder.test_a_run_does_not_resume_from_another_runs_checkpoint,
)


removes(
    ranks_meet,
    "a run on one machine listens at the address that torch chooses",
    killed_by=test_loopback.test_a_script_without_the_command_line_listens_on_the_loopback_only,
    gives=contextlib.nullcontext(),
    takes_long=True,
)


@replaces(serve_on_loopback, killed_by=test_rendezvous.test_under_torchrun_each_start_of_each_run_has_its_own_store)
def the_store_of_one_machine_listens_on_all_interfaces(original, address=LOOPBACK, port=0):
    return TCPStore(address, port, is_master=True, wait_for_workers=False, multi_tenant=True)


removes(
    check_processes,
    "each process of a platform trains alone on all data",
    killed_by=test_platforms.test_a_process_joins_or_is_refused_and_never_trains_alone,
)


@replaces(JobFiles.write, killed_by=test_job_files.test_a_submission_does_not_change_the_files_of_an_earlier_one)
def a_second_submission_overwrites_the_files_of_the_first(original, self, configuration, script=None):
    self.folder.mkdir(parents=True, exist_ok=True)
    self.configuration.write_text(configuration)
    self.script.write_text(str(script))


removes(
    Observation.state,
    "every run folder is free",
    killed_by=test_lease.test_an_owner_on_another_machine_is_waited_for_only_until_its_heartbeat,
    gives=State.FREE,
)
removes(
    Owner.has_ended,
    "the process of an owner on the same machine is not checked",
    killed_by=test_lease.test_kill_9_frees_the_folder_at_once,
)
removes(
    Lease.is_lost,
    "an owner that was taken for dead writes on",
    killed_by=test_lease.test_an_owner_that_was_taken_for_dead_notices_it_and_writes_nothing_more,
    gives=False,
)
removes(
    owns_folders,
    "a run does not own its folder",
    killed_by=test_ownership.test_the_folders_are_free_after_an_error,
    gives=contextlib.nullcontext(),
    noticed_by=(FileNotFoundError,),
)
removes(
    own_version,
    "two runs without a name share a folder",
    killed_by=test_ownership.test_two_runs_without_a_name_get_two_folders,
    gives=contextlib.nullcontext(),
)


@replaces(
    Door.refusal,
    killed_by=test_handshake.test_two_runs_with_one_port_never_mix_in_any_order,
    other=test_handshake.OTHER,
)
def rank_0_lets_ranks_of_other_runs_in(original, self, hello):
    return None


@replaces(
    RankZeroSearch.waits,
    killed_by=test_handshake.test_two_runs_with_one_port_never_mix_in_any_order,
    other=test_handshake.OTHER,
)
def a_rank_leaves_before_its_own_rank_0_arrives(original, self, refused):
    return False
