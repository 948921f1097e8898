"""Clusters: a run that is started again goes on from its own last checkpoint, and not without end."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import test_job
import test_loopback
import test_run_folder
import test_torchrun
from lightning.pytorch.strategies import Strategy
from mutants.faulty import replaces
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from cnnstrategies.cluster.job import Size, sbatch_script
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.cluster.run_folder import begins_anew, refuse_anothers
from cnnstrategies.cluster.run_name import Run
from cnnstrategies.cluster.stores import LOOPBACK, on_loopback, own_store, serve_on_loopback


@replaces(
    sbatch_script,
    killed_by=test_job.test_warned_and_preempted_jobs_are_requeued_and_failed_not,
)
def a_job_is_requeued_more_often_than_was_allowed(
    right: Callable[[ClusterOptions, Size, Path, str, str, bool], str],
    options: ClusterOptions,
    size: Size,
    folder: Path,
    python: str,
    command: str,
    goes_on: bool = False,
) -> str:
    options = replace(options, max_requeues=options.max_requeues + 1)
    return right(options, size, folder, python, command, goes_on)


@replaces(refuse_anothers, killed_by=test_run_folder.test_another_runs_checkpoint_is_not_gone_on_from)
def a_run_goes_on_from_the_checkpoint_of_another(right: Callable[[Path, str], None], last: Path, name: str) -> None:
    pass


@replaces(begins_anew, killed_by=test_run_folder.test_a_fresh_start_is_one_start_and_not_each_restart)
def each_restart_of_a_fresh_run_begins_it_anew(right: Callable[[bool, Run], bool], fresh: bool, run: Run) -> bool:
    return fresh


@replaces(own_store, killed_by=test_torchrun.test_each_start_has_a_store_that_is_not_the_agents)
@contextlib.contextmanager
def ranks_that_are_restarted_meet_in_the_store_of_dead_ones(
    right: Callable[[bool], contextlib.AbstractContextManager[None]], listens: bool = False
) -> Iterator[None]:
    yield


@replaces(on_loopback, killed_by=test_loopback.test_a_script_without_the_command_line)
@contextlib.contextmanager
def a_run_on_one_machine_listens_where_torch_likes(
    right: Callable[[Strategy], contextlib.AbstractContextManager[None]], strategy: Strategy
) -> Iterator[None]:
    yield


@replaces(serve_on_loopback, killed_by=test_torchrun.test_each_start_has_a_store_that_is_not_the_agents)
def the_store_of_one_machine_listens_on_all_interfaces(
    right: Callable[[str, int], TCPStore], address: str = LOOPBACK, port: int = 0
) -> TCPStore:
    return TCPStore(address, port, is_master=True, wait_for_workers=False, multi_tenant=True)
