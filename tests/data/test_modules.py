"""The data modules: shapes, splits, names, and what they say about bad data."""

import warnings
from pathlib import Path

import pytest
import torch
from torchvision.io import write_jpeg, write_png

from cnnstrategies import ConfigurationError
from cnnstrategies.data import (
    CIFAR10DataModule,
    DigitsDataModule,
    FashionMNISTDataModule,
    ImageFolderDataModule,
    MNISTDataModule,
    SyntheticDataModule,
)


def set_up(module):
    module.setup("fit")
    return module


def test_digits_are_split_by_seed_and_the_test_set_is_fixed():
    one, same, other = (set_up(DigitsDataModule(seed=seed)) for seed in (0, 0, 1))
    assert len(one.train_source) + len(one.val_source) + len(one.test_source) == 1797
    assert torch.equal(one.val_source.images, same.val_source.images)
    assert not torch.equal(one.val_source.images, other.val_source.images)
    assert torch.equal(one.test_source.images, other.test_source.images)
    images, targets = next(iter(one.train_dataloader()))
    assert images.shape == (64, *one.image_shape)
    assert images.dtype == torch.float32
    assert targets.dtype == torch.int64
    assert abs(float(torch.cat([x for x, _ in one.val_dataloader()]).mean())) < 0.1
    assert len(one.class_names) == one.num_classes == 10


def test_synthetic_images_are_the_same_for_the_same_seed_and_can_be_learned():
    one, same, other = (
        set_up(SyntheticDataModule(num_samples=60, num_classes=7, image_size=33, channels=2, seed=seed))
        for seed in (0, 0, 1)
    )
    images, targets, _ = one.train_source.fetch([0, 7, 14, 59])
    assert images.shape == (4, 2, 33, 33)
    assert images.dtype == torch.uint8
    assert targets.tolist() == [0, 0, 0, 3]
    assert torch.equal(images, same.train_source.fetch([0, 7, 14, 59])[0])
    assert not torch.equal(images, other.train_source.fetch([0, 7, 14, 59])[0])
    assert not torch.equal(images[0], images[1])
    far = (images[0].float() - images[3].float()).square().mean()
    near = (images[0].float() - images[1].float()).square().mean()
    assert near < far
    assert len(one.val_source) == 6


@pytest.mark.parametrize("module", [MNISTDataModule, FashionMNISTDataModule, CIFAR10DataModule])
def test_a_missing_data_set_is_named_with_the_remedy(module):
    name = module.__name__.removesuffix("DataModule")
    with pytest.raises(ConfigurationError, match=f"no {name} in .*datasets: it is not there.*{name} stores there"):
        module(download=False).prepare_data()


def make_folder(root, parts=("train", "val"), count=6):
    for part in parts:
        for number, name in enumerate(("cat", "dog", "eel")):
            folder = Path(root, part, name)
            folder.mkdir(parents=True)
            for index in range(count):
                image = torch.full((3, 20, 30), 80 * number, dtype=torch.uint8)
                if index % 2:
                    write_png(image[:1], str(folder / f"{index}.png"))  # Grey: becomes colour.
                else:
                    write_jpeg(image, str(folder / f"{index}.JPG"))


def test_image_folder_reads_the_layout_of_imagenet():
    make_folder("images", ("train", "val", "test"))
    make_folder("images/predict", (".",), count=2)
    module = set_up(ImageFolderDataModule(Path("images"), image_size=16, resize=20, batch_size=4, num_workers=0))
    assert module.class_names == ["cat", "dog", "eel"]
    assert module.num_classes == 3
    images, targets = next(iter(module.val_dataloader()))
    assert images.shape[1:] == module.image_shape == (3, 16, 16)
    assert targets.tolist() == [0, 0, 0]  # 18 images in 5 batches of 3 or 4.
    assert sum(len(t) for _, t in module.train_dataloader()) == 18
    names = [module.sample_name(int(i)) for _, indices in module.predict_dataloader() for i in indices]
    assert names == sorted(names)
    assert names[0] == "predict/cat/0.JPG"
    assert len(names) == 6


def test_image_folder_splits_one_tree_by_seed():
    make_folder("images", (".",))
    one, same = (
        set_up(ImageFolderDataModule(Path("images"), val_split=1 / 3, num_workers=0, seed=seed)) for seed in (4, 4)
    )
    assert len(one.train_source), len(one.val_source) == (12, 6)
    assert one.val_source.paths == same.val_source.paths
    assert not set(one.val_source.paths) & set(one.train_source.paths)


def test_broken_images_are_refused_or_skipped_by_their_path():
    make_folder("images")
    whole = Path("images/train/dog/0.JPG").read_bytes()
    Path("images/train/dog/0.JPG").write_bytes(whole[: len(whole) // 2])
    Path("images/train/eel/1.png").write_bytes(b"not an image")
    Path("images/train/cat/2.JPG").write_bytes(b"")
    options = {"image_size": 16, "resize": 16, "batch_size": 9, "num_workers": 0}
    refusing = set_up(ImageFolderDataModule(Path("images"), on_broken="refuse", **options))
    with pytest.raises(ConfigurationError, match=r"broken image images/train/\w+/\d\.\w+ .*on_broken=skip"):
        list(refusing.train_dataloader())
    skipping = set_up(ImageFolderDataModule(Path("images"), on_broken="skip", **options))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = skipping.train_dataloader()
        sizes = [len(targets) for _ in range(2) for _, targets in loader]
    assert len(sizes) == 4
    reported = " ".join(str(w.message) for w in caught)
    broken = {name for name in ("dog/0.JPG", "eel/1.png", "cat/2.JPG") if f"images/train/{name}" in reported}
    assert sum(sizes) == 2 * (18 - len(broken))
    assert broken >= {"eel/1.png", "cat/2.JPG"}
    assert reported.count("left out") == len(broken), "each is reported once"


MISTAKES = {
    "no such directory": (lambda: ImageFolderDataModule(Path("nowhere")), "no directory .*nowhere"),
    "no classes": (lambda: ImageFolderDataModule(Path(".")), "has 0 class directories"),
    "batch size": (lambda: DigitsDataModule(batch_size=0), "batch_size=0"),
    "workers": (lambda: DigitsDataModule(num_workers=-1), "num_workers=-1 is negative"),
    "split": (lambda: set_up(DigitsDataModule(val_split=1.0)), "val_split=1.0 of 1438 samples leaves 0 for training"),
    "synthetic size": (lambda: SyntheticDataModule(num_samples=5), "num_samples=5: at least 10"),
    "synthetic channels": (lambda: SyntheticDataModule(channels=0), "channels=0: at least 1"),
}


@pytest.mark.parametrize(("build", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_refused(build, message):
    with pytest.raises(ConfigurationError, match=message):
        build()


def test_classes_that_training_does_not_have_are_refused():
    make_folder("images")
    Path("images/val/fox").mkdir()
    with pytest.raises(ConfigurationError, match=r"images/val has classes that images/train has not: fox"):
        ImageFolderDataModule(Path("images")).setup("fit")
