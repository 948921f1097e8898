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
from cnnstrategies.data.shards.contents import contents_of
from cnnstrategies.data.shards.packing import pack
from cnnstrategies.data.shards.shard_file import Options

CONFIGS = ROOT / "configs"
FILES = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml"))
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
LARGE = ("experiments/synthetic_", "model/torchvision_vgg16", "model/torchvision_alexnet")
ARGS = {
    "quickstart.yaml": TWO,
    "cluster/one_node_4_gpus.yaml": TWO,
    **{f"cluster/slurm_{kind}_nodes.yaml": TWO for kind in ("cpu", "gpu")},
    "cluster/two_nodes_4_gpus.yaml": TWO,
    "data/cifar10.yaml": [*FEW, *NO_WORKERS, *COLOUR],
    "data/cifar100.yaml": [*FEW, *COLOUR, "--model.init_args.num_classes=100"],
    "data/fashion_mnist.yaml": [*FEW, *NO_WORKERS],
    "data/image_folder.yaml": [*FEW, *NO_WORKERS, *FOLDER, *COLOUR],
    "data/shards.yaml": [
        *FEW,
        *NO_WORKERS,
        "--data.init_args.root=shards",
        "--data.init_args.image_size=32",
        "--model.init_args.num_classes=2",
        *COLOUR,
    ],
    "data/mnist.yaml": [*FEW, *NO_WORKERS],
    "data/synthetic.yaml": [*FEW, *COLOUR, "--data.init_args.image_size=64", "--model.init_args.num_classes=1000"],
    "experiments/cifar10_resnet20_ddp_2gpu.yaml": [*FEW, *NO_WORKERS, *TWO],
    "experiments/cifar10_resnet56_recipe_gpu.yaml": [
        *FEW,
        *NO_WORKERS,
        *AT_ONCE,
        "--model.init_args.network.init_args.blocks=1",
    ],
    "experiments/digits_smallcnn_ema_mixup_cpu.yaml": TWO,
    "experiments/digits_smallcnn_pruning_cpu.yaml": [*TWO, "--trainer.max_epochs=11"],
    "experiments/fashion_mnist_smallcnn_recipe_cpu.yaml": [*FEW, *TWO],
    **{f"experiments/digits_smallcnn_hybrid_{layout}_cpu.yaml": FOUR for layout in ("2-2", "3-1", "1-2-1")},
    "experiments/digits_smallcnn_hybrid_1-1_cpu.yaml": TWO,
    # The wide ones would take a minute.
    "experiments/synthetic_alexnet_hybrid_3-1_4gpu.yaml": [
        *FOUR,
        *SMALL,
        "--model.init_args.network.class_path=narrow_networks.alexnet",
    ],
    "experiments/synthetic_efficientnet_b0_hybrid_1-2-1_4gpu.yaml": [*FOUR, *SMALL],
    "experiments/synthetic_resnet50_hybrid_2-2_4gpu.yaml": [
        *FOUR,
        *SMALL,
        "--model.init_args.network.class_path=torchvision.models.resnet18",
    ],
    "experiments/synthetic_vgg16_hybrid_1-1_2gpu.yaml": [
        *TWO,
        *SMALL,
        "--data.init_args.image_size=32",
        "--model.init_args.network.class_path=narrow_networks.vgg16",
    ],
    "experiments/digits_smallcnn_parameter_server_cpu.yaml": [*TWO, *FORK],
    "experiments/digits_smallcnn_diloco_cpu.yaml": FORK,
    "experiments/digits_smallcnn_slow_link_cpu.yaml": FORK,
    "experiments/digits_smallcnn_elastic_cpu.yaml": FORK,
    "experiments/imagenet_resnet50_ddp_8gpu.yaml": [
        *FEW,
        *NO_WORKERS,
        *FOLDER,
        "--model.init_args.network.class_path=torchvision.models.resnet18",
        "--model.init_args.network.dict_kwargs.num_classes=2",
    ],
    "experiments/imagenet_resnet50_recipe_8gpu.yaml": [
        *FEW,
        *NO_WORKERS,
        *FOLDER,
        *AT_ONCE,
        "--model.init_args.network.class_path=torchvision.models.resnet18",
        "--model.init_args.network.dict_kwargs.num_classes=2",
    ],
    "experiments/folder_resnet50_finetune_gpu.yaml": [
        *FEW,
        *NO_WORKERS,
        *FOLDER[:-1],  # The number of classes is the folder's.
        *AT_ONCE,
        "--model.init_args.network.init_args.name=shufflenet_v2_x0_5",
        "--model.init_args.network.init_args.weights=weights.pth",
    ],
    "experiments/folder_unet_segmentation_gpu.yaml": [
        *FEW,
        *NO_WORKERS,
        *AT_ONCE,
        "--data.init_args.root=masks",
        "--data.init_args.val_split=0.2",
        "--data.init_args.image_size=32",
        "--model.init_args.num_classes=2",
        "--model.init_args.network.init_args.widths=[4, 8]",
    ],
    "model/timm_convnext.yaml": [*SYNTHETIC, *FEW],
    "model/torchvision_alexnet.yaml": [*SYNTHETIC, *FEW],
    "model/torchvision_resnet50.yaml": [*SYNTHETIC, *FEW, "--data.init_args.image_size=32"],
    "model/torchvision_vgg16.yaml": [*SYNTHETIC, *FEW],
    "strategy/ddp.yaml": TWO,
    "strategy/ddp_bf16.yaml": TWO,
    "strategy/ddp_fork.yaml": TWO,
    "strategy/ddp_fp16.yaml": TWO,
    "strategy/ddp_local_sgd.yaml": TWO,
    "strategy/ddp_powersgd.yaml": TWO,
    "strategy/ddp_spawn.yaml": TWO,
    "strategy/hybrid_pipeline.yaml": TWO,
    "strategy/hybrid_pipeline_uneven.yaml": [*FOUR, "--data.init_args.global_batch_size=60"],
    "strategy/parameter_server.yaml": TWO,
    "strategy/parameter_server_async.yaml": [*TWO, *FORK],
    "strategy/parameter_server_local.yaml": [*TWO, *FORK],
    "strategy/parameter_server_ssp.yaml": [*TWO, *FORK],
}


# The quickstart's parts, as they are given together on one command line.
TOGETHER = [
    ("strategy/ddp.yaml", "cluster/one_node_4_gpus.yaml", "data/cifar10.yaml", "model/resnet20.yaml"),
    ("strategy/ddp_bf16.yaml", "cluster/two_nodes_4_gpus.yaml", "data/cifar100.yaml"),
    ("strategy/ddp_fork.yaml", "cluster/slurm_cpu_nodes.yaml", "data/fashion_mnist.yaml"),
    ("strategy/ddp_fp16.yaml", "cluster/slurm_gpu_nodes.yaml", "data/mnist.yaml"),
    ("strategy/ddp_local_sgd.yaml", "data/image_folder.yaml"),
    ("strategy/ddp_powersgd.yaml", "data/shards.yaml"),
    ("strategy/ddp_spawn.yaml", "data/digits.yaml"),
    ("strategy/single.yaml", "model/small_cnn.yaml", "data/synthetic.yaml"),
    ("cluster/kubernetes_gpu_nodes.yaml", "model/timm_convnext.yaml"),
]
FSDP = ("strategy/fsdp.yaml",)
RUNS = [*TOGETHER, *((file,) for file in FILES if not any(file in parts for parts in TOGETHER))]


def words_of(files):
    whole = files[0] == "quickstart.yaml" or files[0].startswith("experiments/")
    configs = [f"--config={CONFIGS / name}" for name in (files if whole else ["quickstart.yaml", *files])]
    return ["fit", *configs, *HERE, *(arg for file in files for arg in ARGS.get(file, []))]


def is_dear(files):
    """Whether the network is large, or several processes train."""
    return files[0].startswith(LARGE) or not {*TWO, *FOUR}.isdisjoint(words_of(files))


def with_marks(files):
    names = "-".join(file.removesuffix(".yaml") for file in files)
    return pytest.param(files, marks=[pytest.mark.cluster] * is_dear(files), id=names)


@pytest.mark.warm
@pytest.mark.parametrize("files", [with_marks(files) for files in RUNS if files != FSDP])
def test_configs_train(run_cli, downloads, files):
    code, output = run_cli(*words_of(files))
    assert code == 0, output


def test_what_takes_several_processes_is_built(downloads, monkeypatch, capfd):
    """Up to the first process that would be started. Large networks are left to those that train."""
    built = []
    monkeypatch.setattr(Trainer, "fit", lambda trainer, *args, **kwargs: built.append(trainer))
    dear = [files for files in RUNS if is_dear(files) and not files[0].startswith(LARGE)]
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
    files = FILES if callspec is None else callspec.params["files"]
    if any("_segmentation_" in file for file in files):
        write_masked_images(Path("masks/train"), count=5)
    if any(file.endswith("_finetune_gpu.yaml") for file in files):
        torch.save(shufflenet_v2_x0_5(num_classes=5).state_dict(), "weights.pth")
    if "data/shards.yaml" in files:
        pack(contents_of("./images", {}), Path("shards"), Options(None, None, 10**6), workers=1)
