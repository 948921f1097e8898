"""Mutants of the command line: exit statuses and error messages, and the settings that tune proposes."""

import contextlib
import importlib
import sys
import threading
from dataclasses import replace
from math import exp

from cnnstrategies.commands.arguments.command import Command
from cnnstrategies.commands.arguments.refuse import fail
from cnnstrategies.commands.run.errors import check_nulls
from cnnstrategies.commands.run.failures import refusal_in
from cnnstrategies.commands.run.lightning_cli import leaves_out_classes
from cnnstrategies.commands.run.quiet import show_unless_kept
from cnnstrategies.commands.tune.command import choices
from cnnstrategies.planning.tune.race import MARGIN, verdict
from cnnstrategies.runtime.processes import is_stopped, spawned_by_a_thread
from cnnstrategies.runtime.whole_file import remove_abandoned, temporary_name, whole_file, writing
from tests import test_cli, test_processes, test_whole_file
from tests.callbacks import test_predictions
from tests.commands import test_command_failures, test_front, test_quiet, test_refusals, test_tune_command
from tests.mutants.faulty import removes, replaces
from tests.planning import test_race


@replaces(fail, killed_by=test_refusals.test_invalid_runs_are_refused_in_one_line)
def a_mistake_in_the_configuration_ends_like_a_run_that_has_failed(original, message, code=2):
    try:
        original(message, code)
    except SystemExit:
        sys.exit(1)


@replaces(verdict, killed_by=test_race.test_equal_settings_have_no_winner, takes_long=True)
def tune_calls_one_of_two_equal_settings_faster(original, gains, error):
    judged = original(gains, error)
    return replace(judged, outcome="faster") if judged.speed > exp(MARGIN) else judged


@replaces(choices, killed_by=test_tune_command.test_settings_that_change_learning_are_tried_only_when_allowed)
def tune_tries_settings_that_change_learning_without_permission(original, config, model, device, allow):
    return original(config, model, device, [*allow, "precision"])


@replaces(Command.run, killed_by=test_front.test_garbage_collection_is_off_while_a_command_is_imported)
def garbage_collection_runs_while_a_command_is_imported(original, self, words):
    importlib.import_module(f"cnnstrategies.commands.{self.module}").main(self.parse(words)[0])


removes(
    leaves_out_classes,
    "every configuration is parsed twice",
    killed_by=test_cli.test_a_global_batch_that_is_too_small_is_refused_before_processes,
    gives=True,
    takes_long=True,
)
removes(
    check_nulls,
    "null is accepted as a value",
    killed_by=test_refusals.test_null_is_refused_where_a_value_is_needed,
)


@replaces(
    refusal_in,
    killed_by=test_command_failures.test_an_error_of_a_spawned_rank_is_explained_by_its_text,
    noticed_by=(AttributeError,),
)
def a_full_disk_of_a_forked_rank_ends_in_a_traceback(original, traceback):
    return original(traceback.replace("[Errno", "Errno"))


@replaces(show_unless_kept, killed_by=test_quiet.test_tensorboards_thread_leaves_a_full_disk_to_the_logger)
def an_error_of_tensorboards_thread_is_printed_as_a_traceback(original, failure):
    threading.__excepthook__(failure)


removes(
    is_stopped,
    "a stopped rank is not detected",
    killed_by=test_processes.test_a_rank_that_is_killed_or_stopped_is_named,
    gives=False,
    signum=19,
    reason="is stopped, for example by SIGSTOP",
)
removes(
    spawned_by_a_thread,
    "a launcher waits for a spawned process that has died",
    killed_by=test_processes.test_starting_a_process_that_dies_or_stops_in_its_imports_does_not_block,
    gives=contextlib.nullcontext(),
    signum=9,
)


@replaces(whole_file, killed_by=test_predictions.test_a_full_disk_leaves_the_old_predictions_or_none)
@contextlib.contextmanager
def a_file_is_overwritten_in_place(original, path, remedy):
    with writing(path, remedy), open(path, "wb") as file:
        yield file


@replaces(
    temporary_name,
    killed_by=test_whole_file.test_two_processes_that_write_one_file_do_not_disturb_each_other,
)
def two_processes_write_one_partial_file(original, path):
    return path.with_name(f".{path.name}.partial")


removes(
    remove_abandoned,
    "partial files of killed processes stay",
    killed_by=test_whole_file.test_only_partial_files_without_a_writer_are_removed,
)
