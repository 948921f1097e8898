"""Mutants of planning: predicted times, the limit of memory, and the comparison of strategies."""

from dataclasses import replace

from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.predict import Predictor
from cnnstrategies.planning.problem import Problem
from cnnstrategies.planning.rank import rank
from cnnstrategies.planning.scaling.figures import Measurements
from cnnstrategies.planning.scaling.timeline import BARRIER, BUFFERS, GRADIENTS, LOG, predict
from cnnstrategies.planning.stage_shares import propose_stage_shares
from cnnstrategies.shares.dealing import soonest
from tests.mutants.faulty import replaces
from tests.planning import test_partition, test_rank, test_scaling, test_stage_shares, test_unequal


@replaces(Predictor.search, killed_by=test_partition.test_a_memory_limit_is_kept_when_few_layouts_fit)
def the_memory_limit_is_ignored(original, self):
    return original(Predictor(replace(self.job, memory_limit=None)))


@replaces(Problem.dealt, killed_by=test_unequal.test_the_search_keeps_each_devices_limit_and_is_close_to_brute_force)
def microbatches_are_divided_by_speed_alone(original, self, section):
    devices = slice(section.first, section.first + section.replicas)
    return self.job.shares[devices] if self.job.shares else soonest(self.microbatches, self.cluster.speeds[devices])


@replaces(Job.most_samples, killed_by=test_unequal.test_shares_and_accumulation_keep_each_devices_limit)
def all_devices_get_the_limit_of_the_smallest(original, self, peak):
    most = original(self, peak)
    return [min(most)] * len(most)


@replaces(Problem.bound, killed_by=test_partition.test_no_time_is_below_its_bound)
def a_bound_on_a_steps_time_is_too_high(original, self, layout):
    return 2 * original(self, layout)


@replaces(rank, killed_by=test_rank.test_strategies_that_change_learning_are_ranked_separately)
def strategies_that_learn_differently_are_ranked_together(original, job):
    ranking = original(job)
    return replace(ranking, same=(*ranking.same, *ranking.changing))


@replaces(
    propose_stage_shares, killed_by=test_stage_shares.test_a_fast_replica_gets_more_microbatches_than_a_slow_replica
)
def different_shares_appear_to_shorten_transfers(original, placement, schedule, run_ahead, pairs, seconds, step, most):
    return original(placement, schedule, run_ahead, pairs, seconds, 0.0, most)


@replaces(propose_stage_shares, killed_by=test_stage_shares.test_no_rank_runs_more_microbatches_than_it_can_hold)
def replicas_get_more_microbatches_than_fit_into_their_memory(
    original, placement, schedule, run_ahead, pairs, seconds, step, most
):
    return original(placement, schedule, run_ahead, pairs, seconds, step, [9.0] * len(most))


@replaces(predict, killed_by=test_scaling.test_a_planted_cause_is_the_only_one_and_has_its_remedy, name="barrier")
def ranks_wait_for_each_other_only_at_the_end(original, ranks, change):
    return original(ranks, replace(change, without=(BARRIER, BUFFERS, GRADIENTS, LOG)))


@replaces(Measurements.gain_of, killed_by=test_scaling.test_a_cause_that_only_some_rounds_show_is_not_named)
def a_gain_of_some_rounds_is_a_gain(original, self, change, least_step=0.0):
    return self.gain(self.largest.step - max(self.largest.after(change), least_step))
