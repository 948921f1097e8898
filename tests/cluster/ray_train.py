"""A script with Ray Train: each strategy in a TorchTrainer on two nodes of a cluster that is there."""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_checkpoint
from ray.train.lightning import RayTrainReportCallback
from ray.train.torch import TorchTrainer

from cnnstrategies import ImageClassifier
from cnnstrategies.callbacks import GracefulStop
from cnnstrategies.cluster.ray.train import trainer_arguments
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.networks import SmallCNN
from cnnstrategies.strategies import HybridPipelineStrategy, ParameterServerStrategy

STRATEGIES = {
    "ddp": lambda: "ddp",
    "hybrid_pipeline": HybridPipelineStrategy,
    "parameter_server": lambda: ParameterServerStrategy(security="none"),
}


def train(config: dict[str, Any]) -> None:
    seed_everything(1)
    trainer = Trainer(
        strategy=STRATEGIES[config["strategy"]](),
        max_epochs=2,
        limit_train_batches=4,
        limit_val_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[RayTrainReportCallback(), GracefulStop()],
        **trainer_arguments(),
    )
    model = ImageClassifier(SmallCNN(10), 10, lambda parameters: torch.optim.SGD(parameters, 0.1))
    data = DigitsDataModule(global_batch_size=64)
    if (checkpoint := get_checkpoint()) is None:
        trainer.fit(model, data)
        return
    with checkpoint.as_directory() as folder:
        trainer.fit(model, data, ckpt_path=Path(folder) / RayTrainReportCallback.CHECKPOINT_NAME)


def main(folder: str, strategy: str) -> None:
    result = TorchTrainer(
        train,
        train_loop_config={"strategy": strategy},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 2}),
        run_config=RunConfig(name=strategy, storage_path=folder, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    assert result.checkpoint is not None
    print(f"RESULT {strategy} {result.metrics['epoch']} {result.metrics['step']} {result.checkpoint.path}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
