"""A rank of a run of several on one card; checks.py starts them, and compares what they have learned.

NCCL refuses two ranks on one card of one host, so each says that it is a host of its own (``NCCL_HOSTID``), and their
messages go over the loopback. What is seen so is true of the order of what runs on the device, not of speed.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torchvision
from checks import ON_GPU, SGD, NoWaits, trainer_of
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cnnstrategies import ImageClassifier
from cnnstrategies.strategies import HybridPipelineStrategy, ParameterServerStrategy

BATCH, STEPS, SIZE = 32, 6, 64 if ON_GPU else 32
LOST_AT = 3  # The step in which a rank of `lost` ends.


class Held(Callback):
    """Notes what this rank has taken of the card until its first step, and saves all that was learned.

    Args:
        folder: Where to write it, in bytes.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """The network is where it trains."""
        taken = torch.cuda.max_memory_allocated() if ON_GPU else 0
        Path(f"{self.folder}/{trainer.global_rank}.bytes").write_text(str(taken))

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """After the fit a rank has its part alone."""
        trainer.save_checkpoint(f"{self.folder}/own.ckpt")


class InTurn(LightningModule):
    """Builds its network in ``configure_model``, so that a rank of a pipeline never holds more than its stage."""

    network: nn.Module

    def configure_model(self) -> None:
        """As one process would build it, whatever the rank and its device."""
        if not hasattr(self, "network"):
            torch.manual_seed(1)
            self.network = network()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """That of the others."""
        return SGD(self.parameters())


class Lost(Callback):
    """Ends rank 1 as the kernel does where memory is short; each rank says when."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Another rank is in the same step, and waits for this one."""
        if trainer.global_step == LOST_AT and trainer.global_rank == 1:
            torch.cuda.synchronize() if ON_GPU else None
            Path(os.environ["LOST"]).write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def network() -> nn.Module:
    """Of groups rather than batches normalised: so is it the same whatever a batch is cut into."""
    return torchvision.models.resnet18(num_classes=10, norm_layer=lambda channels: nn.GroupNorm(8, channels))


def train(strategy: Any, ranks: int, shards: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """Some steps over the same samples, in the same global batches, whatever divides them."""
    torch.manual_seed(0)
    images, targets = torch.randn(BATCH * STEPS, 3, SIZE, SIZE), torch.randint(10, (BATCH * STEPS,))
    precision = options.get("precision", "64-true")
    if precision == "64-true":
        images = images.double()
    callbacks: list[Callback] = [NoWaits()] if options.get("no_waits") else []
    callbacks += [Lost()] if options.get("lost") else []
    module: LightningModule = ImageClassifier(network(), 10, SGD, compile_backend=options.get("compile"))
    if "held" in options:
        module = InTurn()
        callbacks.append(Held(options["held"]))
    trainer = trainer_of(strategy, precision, callbacks, devices=1, num_nodes=ranks, use_distributed_sampler=False)
    data = TensorDataset(images, targets)
    rank = int(os.environ.get("NODE_RANK", "0"))
    # Lightning's own would shuffle. Of a pipeline those that are not of the first stage load nothing.
    sampler = DistributedSampler(data, shards, rank if rank < shards else 0, shuffle=False)
    loader = DataLoader(data, BATCH // shards, sampler=sampler, pin_memory=ON_GPU)
    trainer.fit(module, loader)
    if "held" in options:
        return torch.load(f"{options['held']}/own.ckpt", map_location="cpu", weights_only=True)["state_dict"]
    whole = trainer.strategy.lightning_module_state_dict()
    return {name: value.cpu() for name, value in whole.items()}


def main() -> None:
    """Arguments: the strategy, its options, and where to put what rank 0 has learned."""
    name, options, file = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    ranks = int(os.environ.get("RANKS", "1"))
    strategy: Any = name
    shards = ranks
    if name == "hybrid_pipeline":
        replicas = options["replicas"]
        shards = replicas[0]
        strategy = HybridPipelineStrategy(
            replicas=replicas, schedule=options.get("schedule", "1f1b"), cuts=options.get("cuts"), microbatches=4
        )
    elif name == "parameter_server":
        strategy = ParameterServerStrategy()
    learned = train(strategy, ranks, shards, options)
    if os.environ.get("NODE_RANK", "0") == "0":
        torch.save(learned, file)


if __name__ == "__main__":
    main()
