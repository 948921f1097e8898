"""The configured global batch is the same under every strategy. These tests start no processes."""

import pytest
import yaml
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from cnnstrategies import ConfigurationError
from cnnstrategies.callbacks import SampleWeights
from cnnstrategies.data import DigitsDataModule, SyntheticDataModule
from cnnstrategies.strategies import HybridPipelineStrategy
from tests.conftest import ROOT, quiet_trainer


def test_the_quickstart_makes_the_same_steps_everywhere():
    options = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())["data"]["init_args"]
    runs = {
        "one device": quiet_trainer(),
        **{name: quiet_trainer(name, 2) for name in ("ddp", "hybrid_pipeline", "parameter_server")},
        "two pipelines": quiet_trainer("hybrid_pipeline", 4),
        "one node more": quiet_trainer("ddp", 2, num_nodes=2),
        "accumulated": quiet_trainer("ddp", 2, accumulate_grad_batches=4),
        "accumulated by a pipeline": quiet_trainer("hybrid_pipeline", 2, accumulate_grad_batches=2),
    }
    for name, run in runs.items():
        data = DigitsDataModule(**options)
        data.trainer = run
        data.setup("fit")
        loading, accumulated = run.distributed_sampler_kwargs or {"num_replicas": 1}, run.accumulate_grad_batches
        assert len(data.train_dataloader()) == 18 * accumulated, name
        first = next(iter(data.train_dataloader()))
        assert len(first[0]) == data.batch_size, name
        assert data.batch_size * loading["num_replicas"] * accumulated == 64, name
        # The size also holds in evaluation.
        assert max(len(images) for images, _ in data.val_dataloader()) <= data.batch_size, name
    unequal = SyntheticDataModule(num_samples=100, image_size=8, global_batch_size=12)
    unequal.trainer = quiet_trainer(HybridPipelineStrategy(replicas=[3, 1]), 4)
    assert unequal.batch_size == 4, "the replicas of the first stage load"
    per_process = DigitsDataModule(batch_size=5)
    per_process.trainer = quiet_trainer("ddp", 2, accumulate_grad_batches=2)
    assert per_process.batch_size == 5, "batch_size is the size for each process"


def test_sizes_that_do_not_go_together_are_refused_before_a_run():
    data, scheduled = DigitsDataModule(global_batch_size=64), GradientAccumulationScheduler({0: 4, 2: 1})
    data.check_trainer(quiet_trainer("ddp", 4))
    DigitsDataModule(batch_size=64).check_trainer(quiet_trainer(callbacks=[scheduled]))
    accumulated = quiet_trainer("ddp", 3, accumulate_grad_batches=4)

    def loaders(trainer):
        data.trainer = trainer
        data.setup("fit")
        data.train_dataloader()

    loaders(quiet_trainer("ddp", 3, callbacks=[SampleWeights()]))
    loaders(quiet_trainer("parameter_server", 3))
    for refused, message in (
        (
            lambda: DigitsDataModule(global_batch_size=11).check_trainer(accumulated),
            "for each of 3 processes that load data x accumulate_grad_batches=4: set it to at least 12",
        ),
        (lambda: loaders(quiet_trainer("ddp", 3)), r"batches have 21 and others 22 samples: add .*SampleWeights\(\)"),
        (
            lambda: data.check_trainer(quiet_trainer(callbacks=[scheduled])),
            "GradientAccumulationScheduler, which changes the number of samples in a step",
        ),
        (
            lambda: DigitsDataModule(batch_size=32, global_batch_size=64),
            r"batch_size=32 .* and global_batch_size=64 .*: set one of them",
        ),
        (lambda: DigitsDataModule(global_batch_size=0), "global_batch_size=0: a batch needs at least 1 sample"),
        (lambda: setattr(data, "batch_size", 16), "batch_size=16 cannot be set, because global_batch_size=64"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            refused()
