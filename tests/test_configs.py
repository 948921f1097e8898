"""Every file under configs/ can be built, as a whole or as a part of the quickstart.

Configurations for one machine also train.
"""

from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.models import shufflenet_v2_x0_5

from cnnstrategies.cli import main
from cnnstrategies.commands.run.lightning_cli import CLI
from cnnstrategies.data.shards.encoding import EncodingOptions
from cnnstrategies.data.shards.packing import pack
from tests.conftest import ROOT
from tests.masked_images import write_masked_images

CONFIGS = ROOT / "configs"
FILES = sorted(path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml"))
HERE = ["--trainer.accelerator=cpu", "--trainer.num_nodes=1", "--trainer.precision=32-true"]
IMAGES = ["--data.init_args.root=images"]
COLOUR = ["--model.init_args.network.init_args.in_channels=3"]
THOUSAND = ["--model.init_args.num_classes=1000"]
TWO = ["--model.init_args.num_classes=2"]
TWO_OF_TORCHVISION = [*TWO, "--model.init_args.network.dict_kwargs.num_classes=2"]
# By file: the arguments with which data and network fit together, folders exist, and nothing is downloaded.
NEEDED = {
    "data/cifar10": COLOUR,
    "data/cifar100": [*COLOUR, "--model.init_args.num_classes=100"],
    "data/image_folder": [*IMAGES, *COLOUR, *TWO],
    "data/shards": ["--data.init_args.root=shards", *COLOUR, *TWO],
    "data/synthetic": [*COLOUR, *THOUSAND],
    "experiments/folder_resnet50_finetune_gpu": [
        *IMAGES,
        "--model.init_args.network.init_args.name=shufflenet_v2_x0_5",
        "--model.init_args.network.init_args.weights=weights.pth",
    ],
    "experiments/folder_retinanet_detection_gpu": [
        *("--data.init_args.root=boxes", "--model.init_args.network.init_args.weights_backbone=null", *TWO),
    ],
    "experiments/folder_unet_segmentation_gpu": ["--data.init_args.root=masks", *TWO],
    "experiments/imagenet_resnet50_ddp_8gpu": [*IMAGES, *TWO_OF_TORCHVISION],
    "experiments/imagenet_resnet50_recipe_8gpu": [*IMAGES, *TWO_OF_TORCHVISION],
    "experiments/synthetic_retinanet_ddp_cpu": ["--data.init_args.num_samples=20"],
    "experiments/synthetic_unet_spatial_2parts": ["--data.init_args.image_size=64", "--data.init_args.num_samples=20"],
    "model/resnet20": ["--data=CIFAR10DataModule"],
    **{f"model/{name}": ["--data=SyntheticDataModule"] for name in ("timm_convnext", "torchvision_resnet50")},
    **{f"model/torchvision_{name}": ["--data=SyntheticDataModule"] for name in ("alexnet", "vgg16")},
    "strategy/hybrid_pipeline_uneven": ["--data.init_args.global_batch_size=60", "--trainer.devices=4"],
}
FORKED = ("diloco", "slow_link", "elastic", "parameter_server", "spatial")


def is_whole(file: str) -> bool:
    return file == "quickstart" or file.startswith("experiments/")


def words_of(*files: str) -> list[str]:
    configs = [f"--config={CONFIGS / name}.yaml" for name in (files if is_whole(files[0]) else ["quickstart", *files])]
    return ["fit", *configs, *HERE, *(word for file in files for word in NEEDED.get(file, []))]


def make_images() -> None:
    for folder in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (Path("images") / folder).mkdir(parents=True)
        Image.new("RGB", (50, 40)).save(f"images/{folder}/0.jpg")


def make_shards() -> None:
    make_images()
    pack(Path("images"), Path("shards"), EncodingOptions(None, None, 10**6), workers=1)


def make_boxes() -> None:
    for folder in ("images", "labels"):
        (Path("boxes/train") / folder).mkdir(parents=True)
    Path("boxes/classes.txt").write_text("cat\n")
    for number in range(2):
        Image.new("RGB", (50, 40)).save(f"boxes/train/images/{number}.jpg")
        Path(f"boxes/train/labels/{number}.txt").write_text("0 0.5 0.5 0.2 0.4\n")


MADE = {
    "=boxes": make_boxes,
    "=images": make_images,
    "=shards": make_shards,
    "=masks": lambda: write_masked_images(Path("masks/train"), count=2),
    "=weights.pth": lambda: torch.save(shufflenet_v2_x0_5(num_classes=5).state_dict(), "weights.pth"),
}


HERE_TRAINED = [file for file in FILES if "/digits_" in file or "_spatial_" in file or file.endswith("_ddp_cpu")]
SYNTHETIC = ("experiments/synthetic_", "experiments/folder_retinanet", "model/timm", "model/torchvision")
LARGE = [(file,) for file in FILES if file.startswith(SYNTHETIC) and file not in HERE_TRAINED]
WHOLE = [(file,) for file in FILES if is_whole(file) and (file,) not in LARGE and file not in HERE_TRAINED]
STRATEGIES = [file for file in FILES if file.startswith("strategy/") and file != "strategy/fsdp"]
OTHERS = [file for file in FILES if not is_whole(file) and not file.startswith("strategy/") and (file,) not in LARGE]
# Pairs of a strategy and another part, because users combine them on the command line.
PARTS = [tuple(filter(None, pair)) for pair in zip_longest(STRATEGIES, OTHERS)]


@pytest.mark.parametrize(
    "files",
    [*WHOLE, *PARTS, *(pytest.param(large, marks=pytest.mark.cluster) for large in LARGE)],
    ids=" and ".join,
)
def test_each_configuration_is_built(files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Build all objects, but do not load the data, which may have to be downloaded, and start no process."""
    words, built = words_of(*files), []
    for end, make in MADE.items():
        if any(word.endswith(end) for word in words):
            make()
    monkeypatch.setattr(CLI, "_run", lambda cli, *args, **kwargs: built.append(cli))
    main(words)
    assert len(built) == 1


def test_a_strategy_for_gpus_is_refused_on_a_cpu(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words_of("strategy/fsdp"))
    assert "FSDP" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.cluster
@pytest.mark.warm
@pytest.mark.parametrize("file", HERE_TRAINED)
def test_configurations_for_one_cpu_machine_train(run_cli, file: str) -> None:
    few = [f"--trainer.{name}=2" for name in ("limit_train_batches", "limit_val_batches")]
    few.append(f"--trainer.max_epochs={11 if 'pruning' in file else 3 if 'retinanet' in file else 1}")
    forks = ["--trainer.strategy.init_args.start_method=fork"] * any(name in file for name in FORKED)
    code, output = run_cli(*words_of(file), *few, *forks)
    assert code == 0, output
