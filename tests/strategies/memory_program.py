"""Train a network with many activations, with a limit for the memory that a process may take beyond its imports."""

import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies.strategies import HybridPipelineStrategy

LAYERS, CHANNELS, SIZE, SAMPLES = 40, 4, 256, 24
ACTIVATION = SAMPLES * CHANNELS * SIZE * SIZE * 4  # Bytes that each layer keeps for its backward.


class Module(LightningModule):
    """Layers without parameters, each of which keeps its result, between two small layers with parameters."""

    def __init__(self) -> None:
        super().__init__()
        ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, CHANNELS)
        self.network = nn.Sequential(nn.PReLU(CHANNELS), *(nn.Tanh() for _ in range(LAYERS)), *ends)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def main() -> None:
    # The launcher starts this program again, so it must not import `conftest`, which removes variables of launchers.
    name, limit = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(1)  # Ranks with different data would train on the data of both.
    data = TensorDataset(torch.randn(SAMPLES, CHANNELS, SIZE, SIZE), torch.randint(CHANNELS, (SAMPLES,)))
    strategy: Any = name
    if name == "hybrid_pipeline":
        # The planner does not know what the process takes besides activations, and may measure unequal times. Only cuts
        # near the middle need less than this limit.
        strategy = HybridPipelineStrategy(memory_limit=limit * 2 // 3)
    devices = 1 if name == "auto" else 2
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, **quiet)
    # Private memory that can be written. Libraries that are imported late, whose code is shared, do not count.
    status = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + limit, resource.RLIM_INFINITY))
    trainer.fit(Module(), DataLoader(data, SAMPLES))
    print(f"trained steps: {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
