"""ResNet-18 on three ranks without Lightning: two replicas of the first half, and one replica of the second half.

torchrun --nproc-per-node 3 docs/examples/pipeline_torch.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torchvision.models import resnet18

from cnnstrategies.pipeline.engine import Pipeline

BATCH, STEPS = 24, 3


def main() -> None:
    """Train on random images, and save the weights of the whole network."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # Every rank needs the same weights.
    network = resnet18(num_classes=10)
    with Pipeline(network, cuts=["layer2"], replicas=[2, 1], microbatches=6) as pipeline:
        optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=0.01, momentum=0.9)
        generator = torch.Generator().manual_seed(1)
        for step in range(STEPS):
            images = torch.randn(BATCH, 3, 32, 32, generator=generator)
            targets = torch.randint(10, (BATCH,), generator=generator)
            # Each replica of the first stage needs only its share. On other ranks the images are ignored.
            mine = slice(pipeline.place.replica, None, pipeline.placement.replicas[0])
            loss = pipeline.step(images[mine], targets[mine], F.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
            if pipeline.rank == 0:
                print(f"step {step}: loss {float(loss):.4f}")
        weights = pipeline.merge()  # The weights of all stages, under the network's own names, on every rank.
        if pipeline.rank == 0:
            torch.save(weights, "resnet18.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
