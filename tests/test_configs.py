"""Every file under configs/ is built, whole, or together with others as parts of the quickstart, and trains."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from masked_images import write_masked_images
from PIL import Image
from torchvision import datasets
from torchvision.models import shufflenet_v2_x0_5

from cnnstrategies.cli import main
from cnnstrategies.commands.run.trainer import Trainer
from cnnstrategies.data.shards.encoding import Options
from cnnstrategies.data.shards.packing import pack

CONFIGS = ROOT / "configs"
FILES = sorted(path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml"))
# What this machine lacks, GPUs, and what takes long; everything else in the file stays as it is.
HERE = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.num_nodes=1",
    "--trainer.precision=32-true",
    "--trainer.limit_train_batches=2",
    "--trainer.limit_val_batches=1",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.max_epochs=1",
    "--trainer.enable_model_summary=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_checkpointing=false",
]
SYNTHETIC = ["--data=SyntheticDataModule", "--data.init_args.num_samples=40", "--data.init_args.image_size=64"]
FEW = ["--data.init_args.global_batch_size=4"]
NO_WORKERS = ["--data.init_args.num_workers=0"]
COLOUR = ["--model.init_args.network.init_args.in_channels=3"]
AT_ONCE = ["--model.init_args.lr_scheduler.init_args.warmup=0"]  # Of one epoch.
FORK = ["--trainer.strategy.init_args.start_method=fork"]
TWO, FOUR = ["--trainer.devices=2"], ["--trainer.devices=4"]
SMALL = ["--data.init_args.num_samples=40", "--data.init_args.image_size=64", "--data.init_args.global_batch_size=12"]
FOLDER = ["--data.init_args.root=images", "--data.init_args.image_size=32", "--model.init_args.num_classes=2"]
RESNET18 = ["--model.init_args.network.class_path=torchvision.models.resnet18"]
TWO_CLASSES = [*RESNET18, "--model.init_args.network.dict_kwargs.num_classes=2"]
LARGE = ("experiments/synthetic_", "model/torchvision_vgg16", "model/torchvision_alexnet")
# Of their layouts the small network trains, and one of these.
BUILT = tuple(f"experiments/synthetic_{name}" for name in ("efficientnet_b0", "resnet50", "vgg16"))
HYBRID = "experiments/digits_smallcnn_hybrid"
ARGS = {
    **dict.fromkeys(
        [
            *(
                "quickstart",
                f"{HYBRID}_1-1_cpu",
                "experiments/digits_smallcnn_ema_mixup_cpu",
                "strategy/hybrid_pipeline",
            ),
            *(
                f"cluster/{name}"
                for name in ("one_node_4_gpus", "slurm_cpu_nodes", "slurm_gpu_nodes", "two_nodes_4_gpus")
            ),
            *(f"strategy/ddp{name}" for name in ("", "_bf16", "_fork", "_fp16", "_powersgd", "_spawn")),
            "strategy/parameter_server",
        ],
        TWO,
    ),
    **{f"{HYBRID}_{layout}_cpu": FOUR for layout in ("2-2", "3-1", "1-2-1")},
    **{f"experiments/digits_smallcnn_{name}_cpu": FORK for name in ("diloco", "slow_link", "elastic")},
    **{f"strategy/parameter_server_{mode}": [*TWO, *FORK] for mode in ("async", "local", "ssp")},
    **{f"data/{name}": [*FEW, *NO_WORKERS] for name in ("fashion_mnist", "mnist")},
    **{f"model/{name}": [*SYNTHETIC, *FEW] for name in ("timm_convnext", "torchvision_alexnet", "torchvision_vgg16")},
    "data/cifar10": [*FEW, *NO_WORKERS, *COLOUR],
    "data/cifar100": [*FEW, *COLOUR, "--model.init_args.num_classes=100"],
    "data/image_folder": [*FEW, *NO_WORKERS, *FOLDER, *COLOUR],
    "data/shards": [*FEW, *NO_WORKERS, "--data.init_args.root=shards", *FOLDER[1:], *COLOUR],
    "data/synthetic": [*FEW, *COLOUR, "--data.init_args.image_size=64", "--model.init_args.num_classes=1000"],
    "experiments/cifar10_resnet20_ddp_2gpu": [*FEW, *NO_WORKERS, *TWO],
    "experiments/cifar10_resnet56_recipe_gpu": [
        *(*FEW, *NO_WORKERS, *AT_ONCE, "--model.init_args.network.init_args.blocks=1"),
    ],
    "experiments/digits_smallcnn_pruning_cpu": [*TWO, "--trainer.max_epochs=11"],
    "experiments/fashion_mnist_smallcnn_recipe_cpu": [*FEW, *TWO],
    # The wide ones would take a minute.
    "experiments/synthetic_alexnet_hybrid_3-1_4gpu": [
        *(*FOUR, *SMALL, "--model.init_args.network.class_path=narrow_networks.alexnet"),
    ],
    "experiments/synthetic_efficientnet_b0_hybrid_1-2-1_4gpu": [*FOUR, *SMALL],
    "experiments/synthetic_resnet50_hybrid_2-2_4gpu": [*FOUR, *SMALL, *RESNET18],
    "experiments/synthetic_vgg16_hybrid_1-1_2gpu": [
        *(*TWO, *SMALL, "--data.init_args.image_size=32"),
        "--model.init_args.network.class_path=narrow_networks.vgg16",
    ],
    "experiments/digits_smallcnn_parameter_server_cpu": [*TWO, *FORK],
    "experiments/imagenet_resnet50_ddp_8gpu": [*FEW, *NO_WORKERS, *FOLDER, *TWO_CLASSES],
    "experiments/imagenet_resnet50_recipe_8gpu": [*FEW, *NO_WORKERS, *FOLDER, *AT_ONCE, *TWO_CLASSES],
    "experiments/folder_resnet50_finetune_gpu": [
        *(*FEW, *NO_WORKERS, *FOLDER[:-1], *AT_ONCE),  # The number of classes is the folder's.
        "--model.init_args.network.init_args.name=shufflenet_v2_x0_5",
        "--model.init_args.network.init_args.weights=weights.pth",
    ],
    "experiments/folder_unet_segmentation_gpu": [
        *(*FEW, *NO_WORKERS, *AT_ONCE, "--data.init_args.root=masks", "--data.init_args.val_split=0.2", *FOLDER[1:]),
        "--model.init_args.network.init_args.widths=[4, 8]",
    ],
    "model/torchvision_resnet50": [*SYNTHETIC, *FEW, "--data.init_args.image_size=32"],
    "strategy/hybrid_pipeline_uneven": [*FOUR, "--data.init_args.global_batch_size=60"],
}
# The quickstart's parts, as they are given together on one command line.
TOGETHER = [
    ("strategy/ddp", "cluster/one_node_4_gpus", "data/cifar10", "model/resnet20"),
    ("strategy/ddp_bf16", "cluster/two_nodes_4_gpus", "data/cifar100"),
    ("strategy/ddp_fork", "cluster/slurm_cpu_nodes", "data/fashion_mnist"),
    ("strategy/ddp_fp16", "cluster/slurm_gpu_nodes", "data/mnist"),
    ("strategy/parameter_server_local", "data/image_folder"),
    ("strategy/ddp_powersgd", "data/shards"),
    ("strategy/ddp_spawn", "data/digits"),
    ("strategy/single", "model/small_cnn", "data/synthetic"),
    ("cluster/kubernetes_gpu_nodes", "model/timm_convnext"),
]
FSDP = ("strategy/fsdp",)
RUNS = [*TOGETHER, *((file,) for file in FILES if not any(file in parts for parts in TOGETHER))]


def words_of(files):
    whole = files[0] == "quickstart" or files[0].startswith("experiments/")
    configs = [f"--config={CONFIGS / name}.yaml" for name in (files if whole else ["quickstart", *files])]
    return ["fit", *configs, *HERE, *(arg for file in files for arg in ARGS.get(file, []))]


def is_dear(files):
    """Whether the network is large, or several processes train, of which servers are some."""
    return files[0].startswith(LARGE) or not {*TWO, *FOUR, *FORK}.isdisjoint(words_of(files))


def with_marks(files):
    return pytest.param(files, marks=[pytest.mark.cluster] * is_dear(files), id="-".join(files))


TRAINED = [files for files in RUNS if files != FSDP and not files[0].startswith(BUILT)]


@pytest.mark.warm
@pytest.mark.parametrize("files", [with_marks(files) for files in TRAINED])
def test_configs_train(run_cli, downloads, files):
    code, output = run_cli(*words_of(files))
    assert code == 0, output


@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.cluster)])
def test_what_takes_several_processes_is_built(downloads, monkeypatch, capfd, large):
    """Up to the first process that would be started."""
    built = []
    monkeypatch.setattr(Trainer, "fit", lambda trainer, *args, **kwargs: built.append(trainer))
    dear = [files for files in RUNS if is_dear(files) and files[0].startswith(BUILT if large else LARGE) == large]
    for files in dear:
        main(words_of(files))
    assert len(built) == len(dear)
    with pytest.raises(SystemExit, match="2"):
        main(words_of(FSDP))
    assert "FSDP" in capfd.readouterr().err.splitlines()[-1], "Lightning has it for GPUs only"


def test_every_file_is_in_a_run():
    assert sorted(file for files in RUNS for file in files) == FILES


@pytest.fixture
def downloads(monkeypatch, request):
    """The files of the downloaded data sets, and a folder of images, small but in their real formats."""
    random = np.random.default_rng(0)
    for name in ("MNIST", "FashionMNIST"):
        raw = Path("datasets") / name / "raw"
        raw.mkdir(parents=True)
        for part, count in (("train", 60), ("t10k", 20)):
            pixels = random.integers(256, size=(count, 28, 28), dtype=np.uint8)
            header = b"".join(n.to_bytes(4, "big") for n in (0x0803, count, 28, 28))
            (raw / f"{part}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
            labels = (np.arange(count) % 10).astype(np.uint8)
            header = b"".join(n.to_bytes(4, "big") for n in (0x0801, count))
            (raw / f"{part}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())
    for cls, key, classes in ((datasets.CIFAR10, "labels", 10), (datasets.CIFAR100, "fine_labels", 100)):
        folder = Path("datasets") / cls.base_folder
        folder.mkdir(parents=True)
        for part in ("train_list", "test_list"):
            # The checksums are those of the real files.
            monkeypatch.setattr(cls, part, [(file, None) for file, _ in getattr(cls, part)])
            for file, _ in getattr(cls, part):
                pixels = random.integers(256, size=(40, 3072), dtype=np.uint8)
                (folder / file).write_bytes(pickle.dumps({"data": pixels, key: [i % classes for i in range(40)]}))
        monkeypatch.setitem(cls.meta, "md5", None)
        names = {cls.meta["key"]: [f"class {index}" for index in range(classes)]}
        (folder / cls.meta["filename"]).write_bytes(pickle.dumps(names))
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            folder = Path("images") / part / name
            folder.mkdir(parents=True)
            for index in range(4):
                Image.fromarray(random.integers(256, size=(50, 40, 3), dtype=np.uint8)).save(folder / f"{index}.jpg")
    callspec = getattr(request.node, "callspec", None)
    files = FILES if callspec is None else callspec.params.get("files", FILES)
    if any("_segmentation_" in file for file in files):
        write_masked_images(Path("masks/train"), count=5)
    if any(file.endswith("_finetune_gpu") for file in files):
        torch.save(shufflenet_v2_x0_5(num_classes=5).state_dict(), "weights.pth")
    if "data/shards" in files:
        pack(Path("images"), Path("shards"), Options(None, None, 10**6), workers=1)
