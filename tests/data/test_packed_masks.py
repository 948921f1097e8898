"""Images and masks in shards: nothing of a mask is lost, and it stays with its image."""

import itertools
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from masked_images import MASK_MISTAKES, write_masked_images
from PIL import Image

from cnnstrategies import ConfigurationError, ImageClassifier, ImageSegmenter
from cnnstrategies.cli import main
from cnnstrategies.data import SegmentationFolderDataModule, ShardedImageDataModule, SyntheticDataModule
from cnnstrategies.data.shards.contents import contents_of
from cnnstrategies.data.shards.packing import pack
from cnnstrategies.data.shards.shard_file import Options

pytestmark = pytest.mark.light
AS_THEY_ARE = Options(None, None, 10**4)


def packed(options=AS_THEY_ARE, **arguments):
    contents = contents_of("SegmentationFolderDataModule", {"root": "data", "num_classes": 2, **arguments})
    return pack(contents, Path("shards"), options, workers=2)


def module(rank=0, ranks=1, **options):
    result = ShardedImageDataModule(Path("shards"), image_size=16, batch_size=4 // ranks, num_workers=0, **options)
    result.sharding = lambda: (ranks, rank)
    result.setup("fit")
    return result


def test_masks_are_packed_without_loss_and_validation_is_that_of_the_folder(monkeypatch):
    write_masked_images(Path("data/train"), count=6)
    write_masked_images(Path("data/val"), count=3)
    Path("data/predict").mkdir()
    Path("data/val/images/0.png").rename("data/predict/x.png")
    Path("data/val/masks/0.png").unlink()
    index = packed(class_names=["dark", "bright"])
    assert (index.class_names, index.ignore_index) == (["dark", "bright"], 255)
    for shard in index.parts["train"].shards:
        with tarfile.open(f"shards/{shard.file}") as file:
            for image, mask in zip(*[iter(file)] * 2, strict=True):
                key = image.name.removesuffix(".png")
                assert mask.name == f"{key}.mask.png"
                with Image.open(file.extractfile(mask)) as found, Image.open(f"data/train/masks/{int(key)}.png") as own:
                    assert np.array_equal(found, own)
    folder = SegmentationFolderDataModule(Path("data"), 2, image_size=16, num_workers=0)
    folder.setup("fit")
    shards = module()
    assert (shards.num_classes, shards.ignore_index) == (2, 255)
    images, masks = folder.val_source.fetch([0, 1])
    reads, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda *args: reads.append(args) or pread(*args))
    found_images, found_masks = shards.val_source.fetch([0, 1])
    assert len(reads) == 2, "one for an image and its mask"
    assert torch.equal(found_masks, masks)
    assert (found_images.int() - images.int()).abs().max() <= 1, "torch and torchvision round alike but for one step"
    assert shards.sample_name(0) == "predict/x.png"
    assert shards.mask_of_image(0, masks[0]).shape == (20, 24)
    assert (shards.predict_source.fetch([0])[1] == 255).all(), "there is no mask"


LARGE = (90, 120)  # Of which random crops are decoded at half their size and less.


@pytest.mark.parametrize("options", [AS_THEY_ARE, Options(48, 95, 10**5)], ids=["as they are", "shrunk"])
def test_an_image_and_its_mask_are_cropped_alike(options):
    write_masked_images(Path("data/train"), 8, LARGE, square=48, kind="jpg")
    packed(options)
    data = module(val_split=1 / 8)
    torch.manual_seed(0)
    shown = [data.train_source.fetch(list(range(7))) for _ in range(8)] + [data.val_source.fetch([0])]
    images, masks = (torch.cat(each) for each in zip(*shown, strict=True))
    bright, counted = images.float().mean(dim=1) > 140, masks != 255
    wrong = ((bright != (masks == 1)) & counted).sum(dim=(1, 2)) / counted.sum(dim=(1, 2))
    assert 0.1 < (masks == 1)[counted].float().mean() < 0.9
    assert wrong.mean() < 0.02, "at the edges of the bright square"


def test_batch_k_is_the_same_for_any_number_of_processes_and_goes_on_with_its_masks():
    write_masked_images(Path("data/train"), count=12)
    packed()
    expected = None
    for ranks in (1, 2):
        loaders = [module(rank, ranks, val_split=1 / 6, augment=False).train_dataloader() for rank in range(ranks)]
        together = [
            sorted(
                (image.sum().item(), mask.sum().item()) for batch in same for image, mask in zip(*batch, strict=True)
            )
            for same in zip(*loaders, strict=True)
        ]
        expected = expected or together
        assert together == expected
    assert len(set(itertools.chain(*expected))) == 10, "each once"
    whole = list(module(val_split=1 / 6).train_dataloader())
    resumed = module(val_split=1 / 6).train_dataloader()
    resumed.load_state_dict({"epoch": 0, "served": 1, **resumed.sampler.identity()})
    for before, after in zip(whole[1:], resumed, strict=True):
        assert torch.equal(before[0], after[0])
        assert torch.equal(before[1], after[1])


@pytest.mark.parametrize(("damage", "message"), MASK_MISTAKES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_mistake_in_masks_ends_a_packing_under_no_final_name(damage, message):
    write_masked_images(Path("data/train"), count=5)
    damage()
    with pytest.raises(ConfigurationError, match=message):
        packed()
    assert not Path("shards").exists()


def test_what_does_not_go_together_is_refused(capsys):
    write_masked_images(Path("data/train"), count=6)
    Path("data/train/masks/3.png").write_text("nothing")
    with pytest.raises(SystemExit):
        main(["pack", "data/", "shards"])
    assert (
        "pack SegmentationFolderDataModule OUT --init_args '{root: data/, num_classes: N}'" in capsys.readouterr().err
    )
    main(["pack", "SegmentationFolderDataModule", "shards", "--init_args", "{root: data, num_classes: 2}"])
    assert "left out, damaged: train/images/3.png: its mask data/train/masks/3.png is broken" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="class_names has 1 names, and num_classes=2"):
        packed(class_names=["one"])
    with pytest.raises(ConfigurationError, match="resize=20: shards has masks"):
        module(resize=20)
    data = module(val_split=0.2)
    network = torch.nn.Identity()
    with pytest.raises(ConfigurationError, match="ShardedImageDataModule has masks, and ImageClassifier learns"):
        ImageClassifier(network, 2).check_data(data)
    with pytest.raises(ConfigurationError, match="ignore_index=9, but ShardedImageDataModule has 255"):
        ImageSegmenter(network, 2, ignore_index=9).check_data(data)
    with pytest.raises(ConfigurationError, match="SyntheticDataModule has no masks"):
        ImageSegmenter(network, 2).check_data(SyntheticDataModule(num_classes=2))
    ImageSegmenter(network, 2).check_data(data)
