"""Mutants of modules, callbacks, checkpoints and exports."""

from pathlib import Path
from unittest.mock import patch

import torch.nn.functional as F

from cnnstrategies import ImageSegmenter
from cnnstrategies._lightning_private import ask_of_sigterm
from cnnstrategies.callbacks import GracefulStop
from cnnstrategies.checkpoints.io import AtomicCheckpointIO
from cnnstrategies.commands.run.start_from import SameCheckpoint
from cnnstrategies.deploy.export import Comparison
from cnnstrategies.models.logits import main_logits
from cnnstrategies.models.network_module import MeanOverSamples
from tests import test_checkpoint_io, test_checkpoint_words, test_export, test_segmentation
from tests.callbacks import test_graceful_stop
from tests.mutants.faulty import removes, replaces
from tests.strategies import test_trainer_on_gpu


@replaces(ImageSegmenter.loss, killed_by=test_segmentation.test_the_loss_is_the_mean_of_images_over_counted_pixels)
def the_loss_of_masks_depends_on_the_division_of_images_over_processes(original, self, outputs, targets):
    return F.cross_entropy(main_logits(outputs), targets, ignore_index=self.ignore_index)


@replaces(
    AtomicCheckpointIO.save_checkpoint, killed_by=test_checkpoint_io.test_a_failing_save_leaves_the_old_checkpoint
)
def the_old_checkpoint_is_deleted_before_the_new_one_is_complete(
    original, self, checkpoint, path, storage_options=None
):
    Path(path).unlink(missing_ok=True)
    original(self, checkpoint, path, storage_options)


removes(
    SameCheckpoint.setup,
    "ranks resume from different checkpoints",
    killed_by=test_checkpoint_words.test_ranks_with_different_checkpoints_do_not_start,
    takes_long=True,
)


@replaces(
    GracefulStop.on_train_batch_end,
    killed_by=test_graceful_stop.test_a_warned_run_saves_the_step_after_which_it_stops,
    noticed_by=(FileNotFoundError,),
    run=test_graceful_stop.WARNED["in the middle of an epoch"],
)
def a_run_that_is_stopped_does_not_save_its_last_step(original, self, trainer, pl_module, outputs, batch, batch_idx):
    with patch.object(trainer, "save_checkpoint"):
        original(self, trainer, pl_module, outputs, batch, batch_idx)


@replaces(
    GracefulStop.on_train_batch_start,
    killed_by=test_graceful_stop.test_a_warned_run_saves_the_step_after_which_it_stops,
    run=test_graceful_stop.WARNED["and first noticed in the next epoch"],
)
def a_run_stops_within_an_accumulation(original, self, trainer, pl_module, batch, batch_idx):
    self._step_at_start = -1 if trainer.global_step else 0


@replaces(Comparison.__init__, killed_by=test_export.test_a_failed_export_is_refused_and_leaves_no_files)
def an_exported_network_may_give_different_logits(original, self, file, images, difference, largest, agreement, of=""):
    original(self, file, images, 0.0, largest, agreement, of)


@replaces(
    MeanOverSamples.update,
    killed_by=test_trainer_on_gpu.test_a_gpu_trains_the_values_of_the_cpu_and_no_step_waits,
    world=1,
    cases=[test_trainer_on_gpu.Case(lambda: "auto")],
    takes_long=True,
)
def a_loss_is_read_on_the_host_before_it_is_added(original, self, mean, samples):
    if not mean.isnan():
        original(self, mean, samples)


removes(
    ask_of_sigterm,
    "each batch waits for lightnings signal flag",
    killed_by=test_trainer_on_gpu.test_a_gpu_trains_the_values_of_the_cpu_and_no_step_waits,
    world=2,
    cases=[test_trainer_on_gpu.Case(lambda: "ddp")],
    takes_long=True,
)
