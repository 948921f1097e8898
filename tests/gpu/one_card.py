"""One of several ranks on one card; checks.py starts the ranks and compares the weights that they have learned.

NCCL refuses two ranks on one card of one host, so each rank claims to be on a host of its own (``NCCL_HOSTID``), and
the ranks' messages go over the loopback. Such a run shows the order of work on the device, but not its speed.
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
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cnnstrategies import ImageClassifier
from cnnstrategies.strategies import HybridPipelineStrategy, ParameterServerStrategy, SpatialStrategy
from cnnstrategies.strategies.predicted_memory import predicted_memory
from tests.gpu.checks import ON_GPU, SGD, NoWaits, trainer_of

BATCH, STEPS, SIZE = 32, 6, 64 if ON_GPU else 32
LOST_AT = 3  # Step in which the check `lost` kills a rank.


class Held(Callback):
    """Records the memory of the card that this rank uses before its first step, and saves the learned weights.

    Args:
        folder: Folder for the number of bytes of each rank and for the checkpoint.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Write the peak memory in bytes: the network is on its device now."""
        taken = torch.cuda.max_memory_allocated() if ON_GPU else 0
        Path(f"{self.folder}/{trainer.global_rank}.bytes").write_text(str(taken))

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Save the whole network now, because after the fit a rank has its own part only."""
        trainer.save_checkpoint(f"{self.folder}/own.ckpt")


class Peaks(Callback):
    """Writes the predicted and the real peak memory of this rank to a file, in bytes.

    The real peak is that of torch's allocator on the card, without the first step, in which cuDNN tries algorithms.

    Args:
        folder: Folder for the files.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.predicted = 0

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Predict the peak of a step."""
        sampling = trainer.distributed_sampler_kwargs
        peaks = predicted_memory(trainer, BATCH // (sampling["num_replicas"] if sampling else 1)).peaks
        self.predicted = peaks[trainer.global_rank].total if peaks else 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Begin to measure after the first step."""
        if ON_GPU and trainer.global_step == 1:
            torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Write both numbers. Without a GPU, the real peak is 0."""
        real = torch.cuda.max_memory_allocated() if ON_GPU else 0
        Path(f"{self.folder}/{trainer.global_rank}.json").write_text(json.dumps([self.predicted, real]))


class InTurn(LightningModule):
    """A module that builds its network in ``configure_model``, so a pipeline's rank never holds more than its stage."""

    network: nn.Module

    def configure_model(self) -> None:
        """Build the network with the same weights on every rank and device."""
        if not hasattr(self, "network"):
            torch.manual_seed(1)
            self.network = network()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Return the same optimizer as the other checks use."""
        return SGD(self.parameters())


class Lost(Callback):
    """Kills rank 1 as the kernel does when memory is short, and writes the time of the kill to a file."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Kill rank 1 in a step in which the other rank waits for it."""
        if trainer.global_step == LOST_AT and trainer.global_rank == 1:
            torch.cuda.synchronize() if ON_GPU else None
            Path(os.environ["LOST"]).write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def network(batch_norm: bool = False) -> nn.Module:
    """Return a ResNet-18. With group normalisation, its results do not depend on the division of a batch."""
    norm = nn.BatchNorm2d if batch_norm else lambda channels: nn.GroupNorm(8, channels)
    return torchvision.models.resnet18(num_classes=10, norm_layer=norm)


def train(strategy: Any, ranks: int, shards: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """Train some steps on the same samples in the same global batches under any strategy; return the weights."""
    torch.manual_seed(0)
    images, targets = torch.randn(BATCH * STEPS, 3, SIZE, SIZE), torch.randint(10, (BATCH * STEPS,))
    precision = options.get("precision", "64-true")
    if precision == "64-true":
        images = images.double()
    callbacks: list[Callback] = [NoWaits()] if options.get("no_waits") else []
    callbacks += [Lost()] if options.get("lost") else []
    callbacks += [Peaks(options["peaks"])] if "peaks" in options else []
    module: LightningModule = ImageClassifier(
        network(options.get("batch_norm", False)),
        10,
        SGD,
        compile_backend=options.get("compile"),
        channels_last=options.get("channels_last", False),
    )
    if "peaks" in options:
        # The peak is predicted without a look at the data.
        module.example_input_array = torch.zeros(2, *images.shape[1:], dtype=images.dtype)
    if "held" in options:
        module = InTurn()
        callbacks.append(Held(options["held"]))
    trainer = trainer_of(
        strategy,
        precision,
        callbacks,
        devices=1,
        num_nodes=ranks,
        use_distributed_sampler=False,
        accumulate_grad_batches=options.get("accumulate", 1),
        gradient_clip_val=options.get("clip"),
    )
    data = TensorDataset(images, targets)
    rank = int(os.environ.get("NODE_RANK", "0"))
    # Lightning's own sampler would shuffle. In a pipeline only ranks of the first stage load data, and one rank of each
    # group has the data of the group.
    shard = rank * shards // ranks if isinstance(strategy, SpatialStrategy) else rank
    sampler = DistributedSampler(data, shards, shard if shard < shards else 0, shuffle=False)
    loader = DataLoader(data, BATCH // shards, sampler=sampler, pin_memory=ON_GPU)
    trainer.fit(module, loader)
    if "held" in options:
        return torch.load(f"{options['held']}/own.ckpt", map_location="cpu", weights_only=True)["state_dict"]
    whole = trainer.strategy.lightning_module_state_dict()
    return {name: value.cpu() for name, value in whole.items()}


def strategy_of(name: str, ranks: int, options: dict[str, Any]) -> tuple[Any, int, int]:
    """Return the strategy, the number of ranks, and the number of shards into which the data are divided."""
    if name == "hybrid_pipeline":
        replicas, schedule = options["replicas"], options.get("schedule", "1f1b")
        pipeline = HybridPipelineStrategy(
            replicas=replicas, schedule=schedule, cuts=options.get("cuts"), microbatches=4
        )
        return pipeline, ranks, replicas[0]
    if name == "spatial":
        parts = options.get("parts", 2)
        return SpatialStrategy(parts=parts, timeout=60.0), ranks, ranks // parts
    if name == "parameter_server":
        # A rehearsal may be slow.
        return ParameterServerStrategy(mode=options.get("mode", "sync"), timeout=60.0), ranks, ranks
    return name, ranks, ranks


def main() -> None:
    """Train one rank; the arguments are the strategy, its options in JSON, and the file for rank 0's weights."""
    name, options, file = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    ranks = int(os.environ.get("RANKS", "1"))
    learned = train(*strategy_of(name, ranks, options), options)
    if os.environ.get("NODE_RANK", "0") == "0":
        torch.save(learned, file)


if __name__ == "__main__":
    main()
