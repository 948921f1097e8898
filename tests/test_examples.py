"""The example scripts of the documentation work."""

import importlib.util
import multiprocessing
import os
import re
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import resnet18

from cnnstrategies.data import ImageFolderDataModule
from tests.conftest import ROOT
from tests.runner.ports import free_port


def run(script: Path, rank: int, world: int, port: int) -> None:
    """Run a script as torchrun does, but in a forked process, which does not have to import torch again."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    runpy.run_path(str(script), run_name="__main__")


def test_pipeline_with_plain_torch():
    port = free_port()
    script = ROOT / "docs/examples/pipeline_torch.py"
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run, args=(script, rank, 3, port)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    weights = torch.load("resnet18.pt", weights_only=True)
    assert weights.keys() == resnet18(num_classes=10).state_dict().keys()


def test_parameter_server_with_plain_torch(capfd):
    runpy.run_path(str(ROOT / "docs/examples/parameter_server_torch.py"), run_name="__main__")
    output = capfd.readouterr().out
    for worker in (0, 1):
        # Two processes write at the same time, so a line may begin directly after the other worker's text.
        losses = [float(loss) for loss in re.findall(rf"worker {worker}, step \d+: loss (\d+\.\d+)", output)]
        assert len(losses) == 4
        assert losses[-1] < losses[0]


@pytest.mark.cluster
@pytest.mark.warm
def test_lines_of_a_file_are_divided_among_processes_and_workers(run_cli, tmp_path):
    for name in ("streams.py", "streams.yaml"):
        shutil.copy2(ROOT / "docs/examples" / name, tmp_path)
    code, output = run_cli("fit", "--config=streams.yaml", "--trainer.max_epochs=2", "--trainer.strategy=ddp_fork")
    assert code == 0, output
    assert re.search(r"stream +each of 2 processes x 2 workers reads all of Lines and keeps its part", output)
    assert re.search(r"stream +1,150 samples in each of 2 epochs", output)


@pytest.mark.extra
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("albumentations", "kornia"))),
    reason="albumentations or kornia is not installed; `make test-extras` installs them",
)
@pytest.mark.parametrize("name", ["Albumentations", "Kornia"])
def test_transforms_of_other_packages_draw_the_same_for_any_number_of_workers(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs/examples")
    transforms = importlib.import_module("transforms")
    for index in range(8):
        folder = Path("images/train", "ab"[index % 2])
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(index).integers(256, size=(32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    batches = []
    for workers, chosen in ((0, [getattr(transforms, name)()]), (2, [getattr(transforms, name)()]), (0, None)):
        data = ImageFolderDataModule(
            Path("images"), image_size=32, batch_size=2, val_split=0.25, num_workers=workers, transforms=chosen
        )
        data.setup("fit")
        batches.append(torch.cat([images for images, _ in data.train_dataloader()]))
    assert batches[0].equal(batches[1])
    assert batches[0].shape == batches[2].shape
    assert not batches[0].equal(batches[2])


@pytest.mark.cluster
@pytest.mark.warm
def test_volumes_are_segmented_in_two_parts(run_cli, tmp_path):
    """The files are in the current directory, as on a user's machine."""
    for name in ("volumes.py", "volumes.yaml"):
        shutil.copy2(ROOT / "docs/examples" / name, tmp_path)
    small = ["--data.init_args.size=16", "--data.init_args.volumes=4", "--trainer.max_epochs=1"]
    code, output = run_cli("fit", "--config=volumes.yaml", *small, "--trainer.strategy.init_args.start_method=fork")
    assert code == 0, output
    assert "val_dice" in output
    assert re.search(r"this rank has had 8 of 16 rows \(depth\), .*, and no operation needed all rows", output)


@pytest.mark.cluster
@pytest.mark.warm
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gan", ["--trainer.strategy=ddp_fork"]),
        ("gan", ["--trainer.strategy=parameter_server_fork"]),
        ("contrastive", ["--trainer.strategy.init_args.start_method=fork"]),
        ("contrastive", ["--model=contrastive.MoCo", "--trainer.strategy.init_args.start_method=fork"]),
        ("faster_rcnn", ["--trainer.strategy=ddp_fork", "--trainer.max_epochs=2"]),
    ],
    ids=["gan-ddp", "gan-servers", "simclr", "moco", "faster-rcnn"],
)
def test_recipes_train(name, options, run_cli, tmp_path):
    for file in (ROOT / "docs/examples").glob(f"{name}.*"):
        shutil.copy2(file, tmp_path)
    few = ["--trainer.limit_train_batches=2", "--trainer.max_epochs=1"]
    code, output = run_cli("fit", f"--config={name}.yaml", *few, *options)
    assert code == 0, output
    if name == "gan":
        assert "distance" in output
        assert len(list(tmp_path.rglob("samples/epoch_000.png"))) == 1
    if name == "faster_rcnn":
        assert "sampled at random" in output
        assert "val_map_50" in output
