"""The loaders in Lightning: sharding, epochs and resuming. Each sample has its number as its target."""

from collections import defaultdict

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn

from cnnstrategies.data.augment import RandomShift
from cnnstrategies.data.loading import TensorSource
from cnnstrategies.data.module import ImageDataModule
from cnnstrategies.shares.samplers import ShuffledBatches
from tests.conftest import quiet_trainer
from tests.runner.forked import in_fork

TRAINING, EVALUATION, BATCH = 53, 23, 4


class Counted(TensorSource):
    def __init__(self, first, size):
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (size, 1, 6, 6), dtype=torch.uint8, generator=generator)
        super().__init__(images, torch.arange(first, first + size))
        self.fetched = []

    def fetch(self, indices):
        self.fetched.append(indices)
        return super().fetch(indices)


class Numbered(ImageDataModule):
    """A data module with the targets 0, 1, ... for training and 100, 101, ... for evaluation."""

    def __init__(self, batch_size=BATCH, num_workers=0, seed=7):
        super().__init__(batch_size, num_workers, seed)
        self.train_transform = nn.Sequential(RandomShift(2), ToFloat())
        self.eval_transform = ToFloat()

    def setup(self, stage):
        self.train_source = Counted(0, TRAINING)
        self.val_source = self.test_source = self.predict_source = Counted(100, EVALUATION)


class ToFloat(nn.Module):
    def forward(self, images):
        return images.float() / 255


class Recorder(LightningModule):
    """A module that records the batches of each stage.

    It calls its optimizer without a backward, because after a backward the process could not fork ranks.
    """

    def __init__(self, automatic=False):
        super().__init__()
        self.automatic_optimization = automatic
        self.layer = nn.Linear(36, 2)
        self.seen = defaultdict(list)

    def training_step(self, batch, batch_idx):
        self.seen["train"].append((self.current_epoch, batch_idx, *(tensor.clone() for tensor in batch)))
        if not self.automatic_optimization:
            self.optimizers().step()
        return self.layer(batch[0].flatten(1)).mean()

    def evaluation_step(self, batch, batch_idx):
        self.seen[self.trainer.state.stage.value].append(batch[1].tolist())

    validation_step = test_step = predict_step = evaluation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveRank(Callback):
    """Saves the batches that each forked rank has seen."""

    def teardown(self, trainer, pl_module, stage):
        torch.save(dict(pl_module.seen), f"{trainer.state.fn.value}-{trainer.global_rank}.pt")


def test_two_ranks_together_see_the_samples_of_one_process():
    def seen(function, **options):
        trainer = quiet_trainer("ddp_fork", 2, max_epochs=2, callbacks=[SaveRank()])
        getattr(trainer, function)(Recorder(automatic=True), datamodule=Numbered(), **options)
        return [torch.load(f"{function}-{rank}.pt", weights_only=True) for rank in range(2)]

    alone = ShuffledBatches(TRAINING, 2 * BATCH, 7, num_replicas=1, rank=0, drop_last=False)
    expected = []
    for epoch in range(2):
        alone.set_epoch(epoch)
        expected += [(epoch, number, sorted(request.indices)) for number, request in enumerate(alone)]
    assert expected[0][2] != expected[len(alone)][2]
    first, second = (rank["train"] for rank in seen("fit"))
    pairs = zip(first, second, strict=True)
    assert [(e, n, sorted(a.tolist() + b.tolist())) for (e, n, _, a), (*_, b) in pairs] == expected
    # Validation and test need no check of their own, because their loaders are created in the same way.
    batches = [rank["predict"] for rank in seen("predict")]
    assert [len(rank) for rank in batches] == [3, 3]
    assert [number for rank in batches for batch in rank for number in batch] == list(range(EVALUATION))


class SaveAt(Callback):
    """Saves a checkpoint once, in one of Lightning's hooks."""

    def __init__(self, hook, epoch, batch, path):
        self.wanted, self.path = (hook, epoch, batch), path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._save(trainer, "batch", batch_idx)

    def on_validation_end(self, trainer, pl_module):
        self._save(trainer, "validation", trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1)

    def on_train_epoch_end(self, trainer, pl_module):
        self._save(trainer, "epoch", None)

    def _save(self, trainer, hook, batch):
        if (hook, trainer.current_epoch, batch) == self.wanted:
            trainer.save_checkpoint(self.path)


# 53 samples in batches of 4 are 14 batches, with the numbers 0 to 13.
POINTS = [
    ("batch", 0, 0),
    ("batch", 1, 4),
    ("batch", 1, 12),
    ("epoch", 0, None),
    ("epoch", 1, None),
    ("validation", 1, 6),
    ("batch", 1, 13),
    ("validation", 1, 13),
]
SOME = {0: POINTS, 2: [("batch", 1, 4), ("epoch", 0, None)]}  # By number of workers.


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return all batches of a run of three epochs without workers, and the paths of its checkpoints by point."""
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = {point: folder / f"{number}.ckpt" for number, point in enumerate(POINTS)}

    def run():
        model = Recorder()
        callbacks = [SaveAt(*point, path) for point, path in paths.items()]
        quiet_trainer(max_epochs=3, val_check_interval=7, callbacks=callbacks).fit(model, datamodule=Numbered())
        return model.seen["train"]

    return in_fork(run), paths


@pytest.mark.parametrize("num_workers", SOME)
def test_a_resumed_run_sees_the_same_batches_bit_for_bit(uninterrupted, num_workers):
    expected, paths = uninterrupted
    for point in SOME[num_workers]:
        path, (_, epoch, batch) = paths[point], point
        after = [batch_seen for batch_seen in expected if batch_seen[:2] > (epoch, 99 if batch is None else batch)]
        model, data = Recorder(), Numbered(num_workers=num_workers)
        quiet_trainer(max_epochs=3, val_check_interval=7).fit(model, datamodule=data, ckpt_path=path, weights_only=True)
        seen = model.seen["train"]
        assert [batch_seen[:2] for batch_seen in seen] == [batch_seen[:2] for batch_seen in after], point
        for (*_, images, targets), (*_, other_images, other_targets) in zip(seen, after, strict=True):
            assert torch.equal(images, other_images), point
            assert torch.equal(targets, other_targets), point
        if num_workers == 0:
            assert len(data.train_source.fetched) == len(after), (
                f"{point}: batches from before the checkpoint are not read again"
            )


def test_overfit_batches_gives_the_same_batches_in_each_epoch():
    model = Recorder()
    quiet_trainer(max_epochs=2, overfit_batches=2).fit(model, datamodule=Numbered())
    batches = [(number, targets.tolist()) for _, number, _, targets in model.seen["train"]]
    assert batches == [(0, [0, 1, 2]), (1, [3, 4, 5, 6])] * 2
