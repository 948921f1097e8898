"""Images in shards: reading returns the packed images, packing can be interrupted, and faults are named."""

import errno
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins import DoublePrecision
from PIL import Image

from cnnstrategies import ConfigurationError
from cnnstrategies.cli import main
from cnnstrategies.data import ShardedImageDataModule
from cnnstrategies.data.decoding import decode
from cnnstrategies.data.preprocessing import Preprocessing
from cnnstrategies.data.shards import packing
from cnnstrategies.data.shards.encoding import EncodingOptions, encode
from cnnstrategies.data.shards.index import INDEX, SAMPLES, read_index
from cnnstrategies.data.shards.jpeg import cut, find_decoder, read_header
from cnnstrategies.data.shards.packing import pack
from cnnstrategies.data.shards.source import random_crops
from tests.masked_images import write_masked_images

pytestmark = pytest.mark.light
AS_THEY_ARE = EncodingOptions(None, None, 6000)
SHRUNK = EncodingOptions(32, 90, 6000)


def picture(seed, width, height):
    noise = np.random.default_rng(seed).integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def make_folder(root="images", count=14):
    """Write images of several file types, each image with a class of its own, so that its target identifies it."""
    for number in range(count):
        folder = Path(root, "train", f"c{number:02}")
        folder.mkdir(parents=True)
        image, path = picture(number, 90 + number, 70), folder / "one.jpg"
        if number % 7 == 1:
            image.save(path, "PNG")
        elif number % 7 == 2:
            image.convert("L").save(path)
        elif number % 7 == 3:
            image.save(path, progressive=True)
        elif number % 7 == 4:
            exif = Image.Exif()
            exif[0x0112] = 6
            image.save(path, exif=exif)
        else:
            image.save(path, quality=90)
    return Path(root)


@pytest.fixture
def packed():
    return pack(make_folder(), Path("shards"), AS_THEY_ARE, workers=2)


def module(ranks=1, rank=0, **options):
    result = ShardedImageDataModule(
        Path("shards"), image_size=24, **{"batch_size": 4, "num_workers": 0, "val_split": 1 / 7, **options}
    )
    result.sharding = lambda: (ranks, rank)
    result.setup("fit")
    return result


def test_shards_contain_the_packed_files_and_each_image_takes_one_read(packed, monkeypatch):
    members = {}
    for shard in packed.parts["train"].shards:
        with tarfile.open(f"shards/{shard.file}") as file:
            names = file.getnames()
            # In WebDataset's format, consecutive members with the same name up to the first dot are one sample.
            assert [name.split(".")[0] for name in names[::2]] == [name.split(".")[0] for name in names[1::2]]
            members |= {name: file.extractfile(name).read() for name in names}
    assert len(packed.parts["train"].shards) > 2
    source = module(val_split=0.1).train_source
    reads = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: reads.append(args) or pread(*args))
    for number in range(len(source)):
        name = source.name(number)
        original = Path("images", name).read_bytes()
        assert source.read(number) == original
        target = int(source.targets[number])
        assert f"c{target:02}" in name
        assert members[f"{target:09}.cls"] == str(target).encode()
        assert original in (members.get(f"{target:09}.jpg"), members.get(f"{target:09}.png"))
        assert decode(Path("images", name)).shape[1:] == tuple(source.columns[n][number] for n in ("height", "width"))
    assert len(reads) == len(source), "one pread for each image"
    pickle.loads(pickle.dumps(source)).fetch([0, 1])


def test_other_formats_than_jpeg_png_and_webp_are_packed_as_png():
    picture(0, 40, 30).save("one.tif")
    encoded = encode(Path("one.tif").read_bytes(), None, None)
    assert (encoded.extension, encoded.width, encoded.height) == ("png", 40, 30)
    assert torch.equal(decode(io.BytesIO(encoded.data)), decode(Path("one.tif")))


def test_images_are_prepared_as_pretrained_weights_expect(packed):
    halves = Preprocessing(32, 40, "bicubic", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    data = ShardedImageDataModule(Path("shards"), batch_size=4, num_workers=0)
    data.prepare_as(halves)
    data.setup("validate")
    assert (data.image_shape, data.resize) == ((3, 32, 32), 40)
    pixels = data.val_source.fetch([0])[0]
    torch.testing.assert_close(next(iter(data.val_dataloader()))[0][:1], (pixels / 255 - 0.5) / 0.25)
    data.val_source.interpolation = "bilinear"
    assert not torch.equal(data.val_source.fetch([0])[0], pixels)


@pytest.mark.parametrize("options", [AS_THEY_ARE, SHRUNK])
def test_a_partly_decoded_crop_equals_the_crop_of_the_whole_image(options):
    """The pixels are equal, although little more than the crop is decoded."""
    pack(make_folder(), Path("shards"), options, workers=1)
    source = module(val_split=0.1).train_source
    draw, shorter = random.Random(0), 0
    decoder = find_decoder("pillow")
    for number in range(len(source)):
        data = source.read(number)
        header = read_header(data)
        assert source.columns["plain"][number] <= (header is not None)
        if header is None or not source.columns["plain"][number]:
            assert options is AS_THEY_ARE
            continue
        Path("x.jpg").write_bytes(data)
        whole = decode(Path("x.jpg")).permute(1, 2, 0)
        for _ in range(8):
            left, top = draw.randrange(header.width - 1), draw.randrange(header.height - 1)
            right, bottom = draw.randint(left + 1, header.width), draw.randint(top + 1, header.height)
            shown = cut(data, header, left, top, right, bottom)
            part = decoder(shown, 1)
            shorter += part.numel() < whole.numel()
            crop = part[top - shown.top : bottom - shown.top, left - shown.left : right - shown.left]
            assert torch.equal(crop, whole[top:bottom, left:right])
    assert shorter > 20


def test_a_large_crop_is_decoded_small_and_looks_the_same(packed, monkeypatch):
    loaded = module(augment=False)
    scales, decode_whole = [], loaded.train_source.decode_jpeg
    loaded.train_source.decode_jpeg = lambda jpeg, scale: scales.append(scale) or decode_whole(jpeg, scale)
    few, _ = loaded.train_source.fetch(list(range(12)))
    assert set(scales) == {2}, "crops of 61 for images of 24"
    monkeypatch.setattr("cnnstrategies.data.shards.source.SCALES", ())
    all_of_it, _ = loaded.train_source.fetch(list(range(12)))
    difference = (few.float() - all_of_it.float()).abs()
    assert 0 < difference.mean() < 8


def test_batch_k_is_the_same_for_any_processes_and_workers(packed):
    expected = None
    for ranks, workers in ((1, 0), (2, 0), (4, 0), (1, 2)):
        modules = [module(ranks, rank, batch_size=4 // ranks, num_workers=workers) for rank in range(ranks)]
        batches = [[t.tolist() for _, t in each.train_dataloader()] for each in modules]
        together = [sorted(itertools.chain(*same)) for same in zip(*batches, strict=True)]
        expected = expected or together
        assert together == expected
    assert sorted(itertools.chain(*expected)) == sorted(modules[0].train_source.targets.tolist())
    assert len(set(modules[0].train_source.targets.tolist())) == 12


def test_reads_of_a_whole_batch_are_announced_to_the_system_first(packed, monkeypatch):
    source, seen, read = module().train_source, [], os.pread
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, count, advice: seen.append((file, count, start)))
    monkeypatch.setattr(os, "pread", lambda *arguments: seen.append(arguments) or read(*arguments))
    source.fetch([7, 0, 3])
    assert len(set(seen)) == 3
    assert seen[:3] == seen[3:], "the announced ranges are read later"


def test_normalising_on_the_device_gives_the_same_values(packed):
    plain, late = module(), module(pin_memory=False)
    late.trainer = SimpleNamespace(
        accelerator=CUDAAccelerator(),
        precision_plugin=DoublePrecision(),
        strategy=None,
        callbacks=[],
        accumulate_grad_batches=1,
    )
    for (images, targets), batch in zip(plain.train_dataloader(), late.train_dataloader(), strict=True):
        assert batch[0].dtype == torch.uint8
        moved, moved_targets = late.transfer_batch_to_device(list(batch), torch.device("cpu"), 0)
        assert torch.equal(moved, images.double()), "the dtype of the trainer's precision"
        assert moved.is_contiguous()
        assert torch.equal(moved_targets, targets)


def test_an_interrupted_pack_leaves_nothing_and_can_be_repeated(monkeypatch):
    source, calls = make_folder(), []
    whole = pack(source, Path("whole"), AS_THEY_ARE, workers=1)

    def fails(*args):
        calls.append(args)
        if len(calls) == 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        return encode(*args)

    monkeypatch.setattr(packing, "encode", fails)
    with pytest.raises(ConfigurationError, match=r"cannot write shards: No space .*run the same command"):
        pack(source, Path("shards"), AS_THEY_ARE, workers=1)
    assert not list(Path().glob("*shards*"))
    again = pack(source, Path("shards"), AS_THEY_ARE, workers=1)
    for field, column in again.parts["train"].columns.items():
        assert np.array_equal(column, whole.parts["train"].columns[field])
    assert sorted(os.listdir("shards")) == sorted(os.listdir("whole"))
    with pytest.raises(ConfigurationError, match="shards exists already"):
        pack(source, Path("shards"), AS_THEY_ARE, workers=1)


def test_the_command_lists_damaged_images_and_checks_shards(capsys):
    make_folder()
    Path("images/train/c00/two.jpg").write_bytes(Path("images/train/c00/one.jpg").read_bytes()[:400])
    main(["pack", "images/", "shards", "--size", "32"])
    output = capsys.readouterr().out
    assert "train/c00/two.jpg is damaged and was left out: " in output
    assert "14 images for train in 1 shards" in output
    main(["pack", "--check", "shards"])
    assert "all checksums match" in capsys.readouterr().out
    shard = Path("shards/train-000000.tar")
    content = bytearray(shard.read_bytes())
    content[700] ^= 1
    shard.write_bytes(content)
    write_masked_images(Path("masks/train"), count=2)
    for words, message in (
        (["--check", "shards"], "train-000000.tar is damaged: its checksum"),
        (["nothing", "out"], "no directory "),
        (["images/", "out", "--quality", "99"], "--quality 99 is outside the range from 1 to 95"),
        (["masks/", "out"], "masks has masks, which cannot be packed: train with SegmentationFolderDataModule"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["pack", *words])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    assert not Path("out").exists()


def test_faults_of_shards_are_named_with_the_remedy(packed, monkeypatch):
    index, samples, shard = (Path("shards", name) for name in (INDEX, SAMPLES, "train-000001.tar"))
    pack(make_folder("more", 15), Path("others"), SHRUNK, workers=1)
    foreign, intact = Path("others/train-000001.tar").read_bytes(), shard.read_bytes()
    size, broken, columns = len(intact), bytearray(intact), packed.parts["train"].columns
    for start in columns["offset"][columns["shard"] == 1].tolist():
        broken[start : start + 200] = bytes(200)
    described = json.loads(index.read_bytes())
    first = described["parts"]["train"][0]

    def with_shard(file):
        return described | {"parts": {"train": [first | {"file": file}]}}

    fewer = described | {"class_names": described["class_names"][:5]}
    outside = str(Path("others/train-000000.tar").resolve())
    for path, content, message in (
        (shard, intact[:-600], rf"000001.tar is truncated: it has {size - 600} of {size} bytes; copy it"),
        (shard, intact + b"0", "the two files were not written together; copy all files"),
        (shard, (foreign * 9)[:size], "was not written together with index.json: copy all files of the same"),
        (shard, broken, r"broken image train/c\d\d/one.jpg in shards/train-000001.tar \(.*--check shards"),
        (samples, b"PK", "samples.npz was not written together with index.json, or is damaged: copy both"),
        (index, b"{", "index.json is damaged"),
        (index, {}, r"index.json is damaged \(KeyError: 'version'\)"),
        (
            index,
            described | {"version": 9},
            "has the format version 9, but this version of cnnstrategies reads format version 1",
        ),
        (index, with_shard("../more/train.tar"), "which is not a file in this folder: replace links"),
        (index, with_shard(outside), "which is not a file in this folder: replace links"),
        (index, with_shard("none.tar"), "the shard shards/none.tar is missing: copy it"),
        (index, fewer, r"an image of class 13, but the index has only 5 classes \(0 to 4\)"),
    ):
        before = path.read_bytes()
        path.write_bytes(json.dumps(content).encode() if isinstance(content, dict) else content)
        with pytest.raises(ConfigurationError, match=message):
            list(module(val_split=0.1).train_dataloader())
        path.write_bytes(before)
    columns = dict(np.load(samples))
    names = columns["train.name"]
    impossible = [{"train.name": names[:-1]}]
    for field, wrong in (("shard", 9), ("offset", -1), ("offset", 2**40), ("length", 0), ("target", -2), ("width", 0)):
        changed = columns[f"train.{field}"].astype(np.int64)
        changed[3] = wrong
        impossible.append({f"train.{field}": changed})
    for changed in impossible:
        np.savez(samples, **{**columns, **changed})
        index.write_text(json.dumps(described | {"samples": hashlib.sha256(samples.read_bytes()).hexdigest()}))
        with pytest.raises(ConfigurationError, match=r"index.json is damaged \(ValueError: train has im"):
            read_index(Path("shards"))
    shard.rename("elsewhere.tar")
    shard.symlink_to(Path("elsewhere.tar").resolve())
    with pytest.raises(ConfigurationError, match=r"which is not a file in this folder: replace links with the files"):
        read_index(Path("shards"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigurationError, match="decoder=simplejpeg needs the package simplejpeg: pip install simplejpeg, or use"
    ):
        find_decoder("simplejpeg")


# Mean width and height of 200,000 crops of torchvision's RandomResizedCrop for images of 500 x 375 pixels.
TORCHVISION = (281.9, 270.3)


def test_crops_are_drawn_as_torchvision_draws_them():
    torch.manual_seed(0)
    count = 20000
    crops = random_crops(np.full(count, 500), np.full(count, 375))
    widths, heights = (np.array([getattr(crop, name) for crop in crops]) for name in ("width", "height"))
    assert all(crop.left + crop.width <= 500 and crop.top + crop.height <= 375 for crop in crops)
    assert widths.mean() == pytest.approx(TORCHVISION[0], rel=0.01)
    assert heights.mean() == pytest.approx(TORCHVISION[1], rel=0.01)
    assert np.mean([crop.mirrored for crop in crops]) == pytest.approx(0.5, abs=0.02)
    narrow = random_crops(np.array([10]), np.array([1000]))[0]  # The image is too narrow for every crop that is drawn.
    assert (narrow.width, narrow.height, narrow.top) == (10, 13, 493)
