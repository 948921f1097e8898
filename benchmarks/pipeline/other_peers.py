"""Our step against torchgpipe and DeepSpeed's PipelineModule, with two stages and the same cut.

Each peer has an environment of its own, where this page's torch is seen too; ours runs there too, in two other
processes, a step each in turn. A step is forward, backward and SGD. torchgpipe runs both stages as threads of one
process, the other one waits; its backward has no parallel stages on CPUs, since autograd has one thread for all.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from pathlib import Path

import torch
import torch.nn.functional as F
from networks import images, resnet_like, vgg_like
from peer_step import MICROBATCHES, SAMPLES, Step, row
from ranks import report, run_contest
from torch import Tensor, nn

from cnnstrategies.pipeline.engine import Pipeline

LIBRARIES = {"torchgpipe": "torchgpipe==0.0.7", "DeepSpeed": "deepspeed==0.19.8"}
# Network, classes, the cut's name and the second stage's first child.
NETWORKS = {"VGG-11 with BatchNorm": (vgg_like, 100, "_14", 15), "ResNet-20": (resnet_like, 10, "relu_6", 3)}
PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
RATE = 1e-4
Network = Callable[[], nn.Sequential]


def torchgpipe(network: nn.Sequential, cut: int, rank: int, inputs: Tensor, targets: Tensor) -> Step:
    """Both stages in rank 0; the other has nothing to do."""
    if rank:
        return lambda: None
    from torchgpipe import GPipe

    model = GPipe(network, [cut, len(network) - cut], devices=["cpu", "cpu"], chunks=MICROBATCHES, checkpoint="never")
    optimizer = torch.optim.SGD(model.parameters(), RATE)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def deepspeed(network: nn.Sequential, cut: int, rank: int, inputs: Tensor, targets: Tensor) -> Step:
    """A stage in each rank."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    import deepspeed as library
    from deepspeed.accelerator import get_accelerator
    from deepspeed.pipe import PipelineModule

    # The all-reduce in shared memory, which two stages do not use, needs a compiler.
    library.ops.__compatible_ops__[get_accelerator().create_op_builder("ShareMemCommBuilder").NAME] = False
    library.utils.logging.logger.setLevel("ERROR")
    library.init_distributed("gloo", dist_init_required=False)
    children = list(network)
    model = PipelineModule(
        [nn.Sequential(*children[:cut]), nn.Sequential(*children[cut:])],
        num_stages=2,
        loss_fn=F.cross_entropy,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )
    engine, *_ = library.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config={
            "train_batch_size": SAMPLES,
            "train_micro_batch_size_per_gpu": SAMPLES // MICROBATCHES,
            "gradient_accumulation_steps": MICROBATCHES,
            "optimizer": {"type": "SGD", "params": {"lr": RATE}},
            "steps_per_print": 10**9,
        },
    )

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        pieces = list(zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True))
        for each in repeat(pieces):
            yield from each

    source = batches()
    return lambda: float(engine.train_batch(data_iter=source))


def ours(make: Network, cut: str, inputs: Tensor, targets: Tensor, rank: int) -> Step:
    """The pipeline."""
    torch.manual_seed(1)
    pipeline = Pipeline(make(), [cut], [1, 1], MICROBATCHES)
    optimizer = torch.optim.SGD(pipeline.module.parameters(), RATE)

    def step() -> float:
        optimizer.zero_grad()
        loss = pipeline.step(inputs, targets, F.cross_entropy)
        optimizer.step()
        return loss.item()

    return step


PEERS = {"torchgpipe": torchgpipe, "DeepSpeed": deepspeed}


def theirs(
    library: str, make: Callable[[], nn.Sequential], cut: int, inputs: Tensor, targets: Tensor, rank: int
) -> Step:
    """A peer's step on a rank."""
    torch.manual_seed(1)
    return PEERS[library](make(), cut, rank, inputs, targets)


def worker(library: str, rounds: int, path: Path) -> None:
    """Race one library, in its environment; the result goes to a file, since libraries print."""
    torch.set_num_threads(1)
    rows = []
    for title in NETWORKS:
        make, classes, name, cut = NETWORKS[title]
        data = images(32, SAMPLES, classes)
        peer, our_ranks = run_contest(
            2, [partial(theirs, library, make, cut, *data), partial(ours, make, name, *data)], rounds
        )
        losses = peer[0][2], our_ranks[0][2]
        if abs(losses[0] - losses[1]) > 1e-4 * abs(losses[1]):
            raise SystemExit(f"{title}: {library}'s loss is {losses[0]}, ours {losses[1]}")
        rows.append(row(title, name, our_ranks, peer))
    path.write_text(json.dumps(rows))


def environment(folder: Path, library: str) -> Path:
    """The Python of an environment with a library, beside the packages of this one."""
    place = folder / library
    python = place / "bin" / "python"
    whole = place / "whole"  # Not there where an earlier call was ended in between.
    if not whole.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        packages = subprocess.run([str(python), "-c", PURELIB], check=True, capture_output=True, text=True).stdout
        Path(packages.strip(), "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
        # torchgpipe's requirements build a torch of 2019; it needs nothing but torch.
        options = ["--no-deps"] if library == "torchgpipe" else []
        subprocess.run([str(python), "-m", "pip", "install", "-q", *options, LIBRARIES[library]], check=True)
        whole.touch()
    return python


def main() -> None:
    """Make the environments and race in each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir()) / "pipeline-peers")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], options.rounds, Path(options.worker[1]))
        return
    rows = [
        ("peer", "network", "cut after", "ours, ms", "peer, ms", "ratio", "95 % interval", "processor time, both ranks")
    ]
    with tempfile.TemporaryDirectory() as folder:
        for library, requirement in LIBRARIES.items():
            python, result = environment(options.environments, library), Path(folder) / library
            command = [str(python), __file__, "--rounds", str(options.rounds), "--worker", library, str(result)]
            root = str(Path(__file__).resolve().parents[2])
            environ = {**os.environ, "PYTHONPATH": root, "DS_ACCELERATOR": "cpu"}
            subprocess.run(command, check=True, env=environ, stdout=sys.stderr)
            rows += [(requirement, *each) for each in json.loads(result.read_text())]
    report(
        Path(__file__).with_suffix(".md"),
        "Our step against torchgpipe and DeepSpeed",
        f"{__doc__}\n{SAMPLES} images of 32 x 32 in {MICROBATCHES} microbatches; {options.rounds} rounds of a step "
        "each, in an order that changes; medians, the median ratio of a round, and the ratio of the processor time of "
        "both ranks. The first losses agree. Both peers run with this torch: torchgpipe, whose last release is of "
        "2020, without its requirements, and DeepSpeed without compiled operators, over gloo.",
        rows,
    )


if __name__ == "__main__":
    main()
