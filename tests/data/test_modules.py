"""The data modules: shapes, splits, names, and error messages for invalid data."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from cnnstrategies import ConfigurationError
from cnnstrategies.data import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    DigitsDataModule,
    FashionMNISTDataModule,
    ImageFolderDataModule,
    MNISTDataModule,
    SyntheticDataModule,
    SyntheticSegmentationDataModule,
)
from cnnstrategies.data.preprocessing import Preprocessing
from cnnstrategies.data.small_sets import tensors

pytestmark = pytest.mark.light


def set_up(module):
    module.setup("fit")
    return module


def test_digits_are_split_by_seed_and_the_test_set_is_fixed():
    first, same, other = (set_up(DigitsDataModule(seed=seed)) for seed in (0, 0, 1))
    assert len(first.train_source) + len(first.val_source) + len(first.test_source) == 1797
    assert torch.equal(first.val_source.images, same.val_source.images)
    assert not torch.equal(first.val_source.images, other.val_source.images)
    assert torch.equal(first.test_source.images, other.test_source.images)
    images, targets = next(iter(first.train_dataloader()))
    assert images.shape == (64, *first.image_shape)
    assert images.dtype == torch.float32
    assert targets.dtype == torch.int64
    assert abs(float(torch.cat([x for x, _ in first.val_dataloader()]).mean())) < 0.1
    assert len(first.class_names) == first.num_classes == 10


def test_synthetic_images_follow_the_seed_and_can_be_learned():
    options = {"num_samples": 60, "num_classes": 7, "image_size": 33, "channels": 2}
    (images, targets), (same, _), (other, _) = (
        set_up(SyntheticDataModule(seed=seed, **options)).train_source.fetch([0, 7, 59]) for seed in (0, 0, 1)
    )
    assert (images.shape, images.dtype, targets.tolist()) == ((3, 2, 33, 33), torch.uint8, [0, 0, 3])
    assert torch.equal(images, same)
    assert not torch.equal(images, other)
    first, near, far = images.float()
    assert 0 < (first - near).square().mean() < (first - far).square().mean()


def test_synthetic_masks_fit_their_images_and_follow_the_seed():
    options = {"num_samples": 20, "num_classes": 3, "image_size": 40, "channels": 2}
    data, same, other = (set_up(SyntheticSegmentationDataModule(seed=seed, **options)) for seed in (0, 0, 1))
    images, masks = data.train_source.fetch([0, 7])
    assert (images.shape, images.dtype, masks.shape) == ((2, 2, 40, 40), torch.uint8, (2, 40, 40))
    assert masks.unique().tolist() == [0, 1, 2]
    assert torch.equal(same.train_source.fetch([0, 7])[1], masks)
    assert not torch.equal(other.train_source.fetch([0, 7])[1], masks)
    assert not torch.equal(data.val_source.fetch([0])[1], masks[:1])
    for kind in range(3):  # The noise adds 0 to 127.
        rest = images.movedim(1, -1)[masks == kind].int() - data.train_source.colours[kind].int()
        assert rest.min() >= 0
        assert 60 < rest.float().mean() < 67
        assert rest.max() < 128


def test_a_failed_download_names_data_set_directory_and_remedy(tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # A proxy that refuses every connection.
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    for module in (MNISTDataModule, FashionMNISTDataModule, CIFAR10DataModule, CIFAR100DataModule):
        name = module.__name__.removesuffix("DataModule")
        for download, why in (
            (True, "the download failed"),
            (False, f"it does not exist.*create .*{name} on a machine"),
        ):
            with pytest.raises(ConfigurationError, match=f"no {name} in {tmp_path}/images: {why}") as caught:
                module(root=tmp_path / "images", download=download).prepare_data()
            message = str(caught.value)
            assert "\n" not in message
            assert "data.init_args.root" in message
            assert "DigitsDataModule" in message


def test_downloaded_images_are_channels_first():
    for shape, expected in (((5, 28, 30), (5, 1, 28, 30)), ((5, 28, 30, 3), (5, 3, 28, 30))):
        data = np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)
        images, targets = tensors(SimpleNamespace(data=data, targets=[3, 1, 4, 1, 5]))
        assert (images.shape, images.dtype, images.is_contiguous()) == (expected, torch.uint8, True)
        assert images[2, 0, 7, 9] == data[2, 7, 9].flat[0]
        assert (targets.tolist(), targets.dtype) == ([3, 1, 4, 1, 5], torch.int64)


def make_folder(root, parts=("train", "val"), count=6):
    for part in parts:
        for number, name in enumerate(("cat", "dog", "eel")):
            folder = Path(root, part, name)
            folder.mkdir(parents=True)
            for index in range(count):
                colour = (80 * number,) * 3
                if index % 2:
                    Image.new("L", (30, 20), colour[0]).save(folder / f"{index}.png")  # A grey image becomes RGB.
                else:
                    Image.new("RGB", (30, 20), colour).save(folder / f"{index}.JPG", "JPEG")


def names_of(source):
    return [source.name(index) for index in range(len(source))]


def test_image_folder_reads_the_layout_of_imagenet():
    make_folder("images", ("train", "val", "test"))
    make_folder("images/predict", (".",), count=2)
    module = set_up(ImageFolderDataModule(Path("images"), image_size=16, resize=20, batch_size=4, num_workers=0))
    assert module.class_names == ["cat", "dog", "eel"]
    assert module.num_classes == 3
    images, targets = next(iter(module.val_dataloader()))
    assert images.shape[1:] == module.image_shape == (3, 16, 16)
    assert targets.tolist() == [0, 0, 0]  # 18 images make 5 batches of 3 or 4.
    assert sum(len(t) for _, t in module.train_dataloader()) == 18
    names = [module.sample_name(int(i)) for _, indices in module.predict_dataloader() for i in indices]
    assert names == sorted(names)
    assert names[0] == "predict/cat/0.JPG"
    assert len(names) == 6


def test_images_are_prepared_as_pretrained_weights_expect():
    make_folder("images")
    halves = Preprocessing(32, 40, "bicubic", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    choices = [{}, {"image_size": 16}, {"image_size": 16, "resize": 16}]
    for options, expected in zip(choices, [(32, 40), (16, 20), (16, 16)], strict=True):
        module = ImageFolderDataModule(Path("images"), batch_size=18, num_workers=0, **options)
        module.prepare_as(halves)
        set_up(module)
        assert (module.image_shape, module.resize) == ((3, expected[0], expected[0]), expected[1])
        for loader in (module.train_dataloader(), module.val_dataloader()):
            ((images, targets),) = loader
            assert images.shape == (18, *module.image_shape)
            torch.testing.assert_close(images[targets == 0], torch.full((6, *module.image_shape), -2.0))
        assert "InterpolationMode.BICUBIC" in str(module.crop)
        assert "InterpolationMode.BICUBIC" in str(module.centre)
    small = DigitsDataModule()
    small.prepare_as(halves)
    assert small.image_shape == (1, 8, 8)
    assert small.not_prepared_as == halves


def test_a_file_name_not_in_utf8_is_read_and_written():
    make_folder("images")
    Path("images/val/cat/1.png").rename(os.fsdecode(b"images/val/cat/caf\xe9.png"))
    module = set_up(ImageFolderDataModule(Path("images"), image_size=16, num_workers=0))
    names = [module.sample_name(index) for index in range(len(module.val_source))]
    assert r"val/cat/caf\xe9.png" in names
    assert module.val_source.fetch([names.index(r"val/cat/caf\xe9.png")])[0].shape == (1, 3, 16, 16)
    Path("images/train/cat").rename(os.fsdecode(b"images/train/caf\xe9"))
    with pytest.raises(ConfigurationError, match=r"train/caf\\xe9: the name of this folder is not UTF-8; rename the"):
        ImageFolderDataModule(Path("images"))


def test_a_broken_image_is_refused_by_its_path_in_one_line():
    make_folder("images")
    broken = Path("images/train/dog/0.JPG")
    broken.write_bytes(broken.read_bytes()[:300])
    module = set_up(ImageFolderDataModule(Path("images"), image_size=16, num_workers=0))
    with pytest.raises(
        ConfigurationError, match=r"^broken image images/train/dog/0.JPG \(.*\): repair or .* skips broken images$"
    ):
        list(module.train_dataloader())


def test_folders_with_usual_names_are_found_as_training_validation_and_test():
    for number, (names, test_folder) in enumerate(
        [
            (("training", "validation", "testing"), "testing"),
            (("Train", "Val"), "Val"),
            (("train", "valid", "TEST"), "TEST"),
            ((".", "dev"), "dev"),
        ]
    ):
        root = Path(f"images{number}")
        make_folder(root, names)
        module = set_up(ImageFolderDataModule(root))
        assert module.class_names == ["cat", "dog", "eel"]
        assert [len(source) for source in (module.train_source, module.val_source, module.test_source)] == [18, 18, 18]
        assert module.describe("train") == f"18 in {root / names[0]}, 3 classes"
        assert module.describe("test").splitlines()[0] == f"18 in {root / test_folder}, 3 classes"
        assert ("by which best.ckpt was chosen" in module.describe("test")) == (len(names) == 2)


def test_links_are_followed_and_skipped_files_are_counted():
    make_folder("images", ("train",))
    make_folder("elsewhere", (".",))
    Path("images/train/.cache").mkdir()
    Path("images/train/cat/._0.JPG").write_bytes(b"written by another file system")
    for kind in ("bmp", "tif", "gif"):
        Image.new("RGB", (30, 20)).save(f"images/train/cat/x.{kind}")
    Path("images/train/cat/notes").write_text("")
    Image.new("RGB", (30, 20)).save("images/train/outside.png")
    Path("images/more/cat").mkdir(parents=True)
    Path("images/train/dog/more").symlink_to(Path("elsewhere/dog").resolve())
    Path("images/train/dog/again").symlink_to(Path("elsewhere/dog").resolve())
    Path("images/train/fox").symlink_to(Path("elsewhere/eel").resolve())
    module = set_up(ImageFolderDataModule(Path("images"), val_split=0.5, image_size=16, num_workers=0))
    assert module.class_names == ["cat", "dog", "eel", "fox"]
    names = names_of(module.train_source) + names_of(module.val_source)
    # The folder of the two links in dog/ is read once.
    assert sum(name.endswith("/5.png") and "/dog/" in name for name in names) == 2
    assert {"train/cat/x.bmp", "train/cat/x.tif"} <= set(names)
    assert len(list(module.train_dataloader())) == 1
    assert module.describe("val") == f"{len(module.val_source)} held out of images/train, 4 classes"
    repeated = next(name for name in ("again", "more") if f"train/dog/{name}/5.png" in names)
    expected = {
        f"folders that links repeat ({repeated})": 1,
        "folders beside train (more)": 1,
        "hidden": 1,
        ".gif": 1,
        "without an extension": 1,
    }
    assert module.left_out == {**expected, "outside of the classes' folders": 1}


def test_a_folder_of_two_classes_and_a_link_that_loops_are_refused():
    make_folder("images", ("train",))
    link = Path("images/train/dog/more")
    for place, message in {
        "images/train/dog": "more is a link to images/train/dog, which contains the link: remove",
        "images/train": "more is a link to images/train, which contains the link: remove",
        "images": "more is a link to images, which contains the link: remove",
        "images/train/cat": "dog/more and images/train/cat are the same folder, .* in dog and in cat: remove",
    }.items():
        link.symlink_to(Path(place).resolve())
        with pytest.raises(ConfigurationError, match=message):
            set_up(ImageFolderDataModule(Path("images"), val_split=0.5, image_size=16, num_workers=0))
        link.unlink()


@pytest.mark.light
def test_splits_below_the_classes_or_one_level_too_deep_are_refused():
    for name in ("cat", "dog"):
        for part in ("train", "val"):
            for folder in (Path("turned", name, part), Path("deep", "data", part, name)):
                folder.mkdir(parents=True)
                Image.new("RGB", (8, 8)).save(folder / "0.png")
    with pytest.raises(ConfigurationError, match=r"the splits would be mixed: .* as in train/cat and val/cat"):
        ImageFolderDataModule(Path("turned"))
    with pytest.raises(
        ConfigurationError, match=r"contains 1 class folders, .* set data.init_args.root to deep/data, w"
    ):
        ImageFolderDataModule(Path("deep"))
    Path("turned/bird").mkdir()  # Here the folder may have classes with the names of splits.
    Image.new("RGB", (8, 8)).save("turned/bird/0.png")
    assert ImageFolderDataModule(Path("turned")).class_names == ["bird", "cat", "dog"]


def test_names_of_classes_that_look_alike_are_equal():
    composed, separate = "caf\u00e9", "cafe\u0301"
    make_folder("images")
    Path("images/train/cat").rename(f"images/train/{separate}")
    Path("images/val/cat").rename(f"images/val/{composed}")
    module = set_up(ImageFolderDataModule(Path("images"), image_size=16, num_workers=0))
    assert module.class_names == [composed, "dog", "eel"]
    assert [len(module.train_source), len(module.val_source)] == [18, 18]
    Path(f"images/val/{separate}").mkdir()
    with pytest.raises(ConfigurationError, match=r"images/val has two folders with the name caf.*'cafe\\u0301'"):
        ImageFolderDataModule(Path("images"))


def folder(*directories, full=False, **options):
    if full or not directories:
        make_folder("images")
    for name in directories:
        Path("images", name).mkdir(parents=True)
    return ImageFolderDataModule(Path("images"), **options)


MISTAKES = {
    "no such directory": (lambda: ImageFolderDataModule(Path("nowhere")), "no directory .*nowhere"),
    "no classes": (lambda: ImageFolderDataModule(Path(".")), "contains 0 class folders"),
    "batch size": (lambda: DigitsDataModule(batch_size=0), "batch_size=0"),
    "workers": (lambda: DigitsDataModule(num_workers=-1), "num_workers=-1 is negative"),
    "sizes of images": (lambda: folder(resize=16, image_size=32), "image_size=32 and resize=16"),
    "empty directory": (lambda: folder("train/owl", full=True), "no images of the class owl in .*owl: .* end in .jpg"),
    "nothing to predict": (lambda: folder("predict", full=True), "no images for predict in"),
    "no images for the test": (lambda: folder("Test/cat", full=True), "no images for test in a folder for each class"),
    "two for one": (lambda: folder("valid", full=True), "images/val and images/valid are both the val split"),
    "for either": (lambda: folder("Eval", full=True), "images/Eval may be the validation or the test split: rename it"),
    "other classes": (
        lambda: folder("val/fox", full=True),
        "images/val contains classes that images/train does not contain: fox",
    ),
    "split": (
        lambda: set_up(DigitsDataModule(val_split=1.0)),
        "val_split=1.0 of 1438 samples gives 0 samples for training",
    ),
    "synthetic size": (lambda: SyntheticDataModule(num_samples=5), "num_samples=5: use at least 10"),
    "synthetic channels": (lambda: SyntheticDataModule(channels=0), "channels=0: use at least 1"),
}


def test_a_mistake_is_refused(tmp_path, monkeypatch):
    for number, (build, message) in enumerate(MISTAKES.values()):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        with pytest.raises(ConfigurationError, match=message):
            build()
