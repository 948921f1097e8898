"""Planning: what is found is near the best, fits into memory, and is compared with its like alone."""

from dataclasses import replace

import test_partition
import test_rank
from mutants.faulty import replaces

from cnnstrategies.planning.predict import Predictor
from cnnstrategies.planning.problem import Problem
from cnnstrategies.planning.rank import rank


@replaces(Predictor.search, killed_by=test_partition.test_a_memory_limit_is_kept_when_few_layouts_fit)
def the_memory_limit_is_not_kept(right, self):
    return right(Predictor(replace(self.job, memory_limit=None)))


@replaces(Problem.bound, killed_by=test_partition.test_no_time_is_below_its_bound)
def a_bound_on_a_steps_time_is_too_high(right, self, layout):
    return 2 * right(self, layout)


@replaces(rank, killed_by=test_rank.test_what_changes_learning_is_ranked_apart)
def strategies_that_learn_differently_are_ranked_together(right, job):
    ranking = right(job)
    return replace(ranking, same=(*ranking.same, *ranking.changing))
