"""Mutants of lines about slow steps."""

import statistics

from cnnstrategies.callbacks.level import has_risen
from cnnstrategies.callbacks.slow_steps import BlockExchange
from tests.callbacks import test_slow_lines
from tests.mutants.faulty import removes, replaces


@replaces(has_risen, killed_by=test_slow_lines.test_noise_has_no_line_and_each_planted_change_is_found_within_50_steps)
def a_rise_need_not_be_larger_than_noise(original, reference, recent, least, needs):
    return statistics.median(recent) > statistics.median(reference) + least


@replaces(
    BlockExchange.complete,
    killed_by=test_slow_lines.test_rank_zero_gets_the_blocks_of_all_ranks_in_order,
)
def rank_zero_judges_blocks_of_some_ranks(original, self):
    return [[block] for block in self._blocks[0]]


removes(
    has_risen,
    "no change is found",
    killed_by=test_slow_lines.test_noise_has_no_line_and_each_planted_change_is_found_within_50_steps,
    gives=False,
)
