"""Mutants of data-parallel training: compression of gradients and shares of the batch."""

from math import inf

from lightning.pytorch.strategies import DDPStrategy

from cnnstrategies.callbacks.first_batch import check_lengths
from cnnstrategies.shares.bets import Bets, ShareDecision, bound
from cnnstrategies.shares.history import ShareHistory
from cnnstrategies.shares.rebalancing import Balance, propose
from cnnstrategies.shares.samplers import DealtBatches
from cnnstrategies.strategies import CompressedDDPStrategy
from cnnstrategies.strategies.loss_comparison import LossComparison, compare_with_parts
from cnnstrategies.strategies.mean_terms import MeanTerm
from cnnstrategies.strategies.parameter_server.step import Stepper
from cnnstrategies.strategies.unfreezing import wrap_if_changed
from tests.callbacks import test_first_batch
from tests.mutants.faulty import removes, replaces
from tests.shares import test_bets, test_rebalancing, test_samplers
from tests.strategies import (
    test_balanced,
    test_data_parallel,
    test_loss_means,
    test_parameter_server_own_code,
    test_unfreezing,
)

removes(
    check_lengths,
    "epochs may have different lengths",
    killed_by=test_first_batch.test_processes_with_unequal_numbers_of_batches_are_refused,
)


@replaces(
    CompressedDDPStrategy.configure_ddp,
    killed_by=test_data_parallel.test_compressed_gradients_stay_close_to_ddps,
    takes_long=True,
)
def compressed_ddp_does_not_compress(original, self):
    DDPStrategy.configure_ddp(self)


removes(
    wrap_if_changed,
    "parameters that are unfrozen later are not averaged",
    killed_by=test_unfreezing.test_parameters_that_are_unfrozen_later_are_trained_as_on_one_device,
    noticed_by=(Exception,),
    name="ddp",
    accumulated=1,
)
removes(
    Stepper.restore_gradients,
    "gradients are gone after a step",
    killed_by=test_parameter_server_own_code.test_gradients_stay_until_the_next_backward,
    takes_long=True,
)


# Shares

removes(
    DealtBatches.weight,
    "ranks with different shares get equal weights",
    killed_by=test_samplers.test_training_cuts_one_permutation_into_steps_and_shares,
    gives=1.0,
)
removes(
    ShareHistory.change,
    "a slow rank keeps its share",
    killed_by=test_balanced.test_no_rank_gets_more_samples_than_fit_into_its_memory,
    takes_long=True,
)
removes(
    MeanTerm.scale,
    "each rank divides by its own number of valid pixels",
    killed_by=test_loss_means.test_each_mean_of_a_loss_has_its_own_divisor,
    strategy=test_loss_means.served,
    accumulated=1,
    takes_long=True,
)
removes(
    compare_with_parts,
    "a sum counts as a mean",
    killed_by=test_loss_means.test_a_sum_is_the_sum_over_the_global_batch,
    gives=LossComparison("mean"),
    strategy=test_loss_means.served,
    takes_long=True,
)
removes(
    Balance.stay,
    "measured shares change although the loss compares samples",
    killed_by=test_loss_means.test_measured_shares_stay_equal_for_such_a_loss,
    takes_long=True,
)


@replaces(bound, killed_by=test_bets.test_a_gain_below_the_noise_is_no_reason_for_a_bet)
def a_gain_below_the_noise_is_a_reason_for_a_bet(original, degrees):
    return 0.0


@replaces(Bets.decide, killed_by=test_bets.test_a_bet_without_a_measurable_gain_is_lost)
def a_change_that_does_not_help_is_kept(original, self, block, shares, propose):
    decision = original(self, block, shares, propose)
    return decision if decision.gain is None or decision.won else ShareDecision(gain=decision.gain, won=True)


removes(
    Bets.load_state_dict,
    "a resumed run has lost no bet",
    killed_by=test_bets.test_after_two_lost_bets_the_shares_stay_also_in_a_resumed_run,
)


@replaces(propose, killed_by=test_rebalancing.test_no_proposed_share_exceeds_a_ranks_memory)
def a_slow_rank_gets_the_share_of_a_fast_rank(original, now, history, seconds, step, fitting):
    return original(now, history, seconds[::-1], step, fitting)


@replaces(
    DealtBatches.rank_batches,
    killed_by=test_balanced.test_a_slow_rank_gets_a_smaller_share_until_it_is_fast_again,
    strategy="ddp",
    takes_long=True,
)
def batches_that_are_already_loaded_are_divided_again(original, self, order, first=0):
    for batch in original(self, order, first):
        self.drawn -= 2
        yield batch


@replaces(propose, killed_by=test_balanced.test_no_rank_gets_more_samples_than_fit_into_its_memory, takes_long=True)
def a_fast_rank_gets_more_samples_than_fit_into_its_memory(original, now, history, seconds, step, fitting):
    return original(now, history, seconds, step, [inf] * len(now))


@replaces(
    Stepper.count,
    killed_by=test_balanced.test_batches_under_changing_shares_train_the_weights_of_one_process,
    strategy="servers",
    ranks=3,
    accumulated=2,
    samples=58,
    takes_long=True,
)
def servers_count_a_repeated_sample_of_another_rank(original, self, samples):
    original(self, max(1, samples))
