"""Images per second of this package's shards and of other loaders, per core and per two cores.

    python benchmarks/data/loaders.py make DIR [--images 20000]
    python benchmarks/data/loaders.py measure DIR [--rounds 2] [--seconds 2.5] [--names ...]
    python benchmarks/data/loaders.py page DIR

`make` writes JPEG files of 500 x 375 pixels, as many bytes as a photo of good quality, and packs the same files for
each loader. `measure` runs all loaders in turn, each in a process of its own that has one core or two, and adds its
results to DIR/results.jsonl; it may be run several times. `page` writes loaders.md beside this file.

All give batches of 64 images of 224 x 224: a random crop of 8 to 100 % of the area and 3:4 to 4:3, resized with
antialiasing and mirrored in half of the cases, as torchvision's RandomResizedCrop draws it. On one core the loader runs
in the measuring process, on two in two worker processes (SPDL: two threads) that share them with it. "Bytes" are uint8,
to be normalised on the device, "floats" are normalised by the loader. The files are in the page cache.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision import transforms as tv

from cnnstrategies.data import ShardedImageDataModule
from cnnstrategies.data.shards.encoding import EncodingOptions
from cnnstrategies.data.shards.packing import pack

BATCH, SIZE, CLASSES, QUALITY = 64, 224, 10, 90
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
PACKAGES = ("torch", "torchvision", "pillow", "simplejpeg", "webdataset", "litdata", "mosaicml-streaming", "spdl")
Batches = Iterator[Any]


def photo(number: int) -> bytes:
    """A JPEG with structure of several sizes and noise."""
    random = np.random.default_rng(number)
    pixels = np.zeros((375, 500, 3), np.float32)
    for columns, strength in ((12, 60), (48, 50), (160, 30)):
        coarse = random.integers(0, 256, (columns * 3 // 4, columns, 3), dtype=np.uint8)
        pixels += np.asarray(Image.fromarray(coarse).resize((500, 375), Image.Resampling.BILINEAR)) * (strength / 255)
    pixels += 50 + random.integers(-9, 10, (375, 500, 1), dtype=np.int8)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def make(folder: Path, images: int) -> None:
    """Write the images, and what each loader reads."""
    import litdata
    from streaming import MDSWriter

    files = [folder / f"images/train/c{number % CLASSES}/{number:06}.jpg" for number in range(images)]
    for file in files[:CLASSES]:
        file.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda pair: pair[1].exists() or pair[1].write_bytes(photo(pair[0])), enumerate(files)))
    for name, options in (("whole", EncodingOptions(None, None, 10**8)), ("256", EncodingOptions(256, QUALITY, 10**8))):
        if not (folder / name).exists():
            pack(folder / "images", folder / name, options, workers=2)
    shuffled = [files[number] for number in np.random.default_rng(0).permutation(images)]
    if not (folder / "lit").exists():
        litdata.optimize(sample_of, [str(file) for file in shuffled], str(folder / "lit"), chunk_bytes="64MB",
                         num_workers=1)  # fmt: skip
    if not (folder / "mds").exists():
        with MDSWriter(out=str(folder / "mds"), columns={"image": "bytes", "label": "int"}) as writer:
            for file in shuffled:
                writer.write(sample_of(str(file)))


def sample_of(file: str) -> dict[str, Any]:
    """Return the record that LitData and Streaming store for an image."""
    return {"image": Path(file).read_bytes(), "label": int(Path(file).parent.name[1:])}


def transform(floats: bool) -> Callable[[Image.Image], torch.Tensor]:
    """The transform of torchvision, on images of Pillow."""
    last = [tv.ToTensor(), tv.Normalize(MEAN, STD)] if floats else [tv.PILToTensor()]
    result: Callable[[Image.Image], torch.Tensor] = tv.Compose(
        [tv.RandomResizedCrop(SIZE), tv.RandomHorizontalFlip(), *last]
    )
    return result


def opened(data: bytes) -> Image.Image:
    """Open an image as ImageFolder's loader does."""
    return Image.open(io.BytesIO(data)).convert("RGB")


def forever(loader: Any) -> Batches:
    """Its epochs one after the other, with the same workers."""
    while True:
        yield from loader


def ours(packed: str, decoder: Any) -> Callable[[Path, int, bool], Batches]:
    """This package's."""

    def build(folder: Path, workers: int, floats: bool) -> Batches:
        module = ShardedImageDataModule(folder / packed, SIZE, decoder=decoder, batch_size=BATCH, num_workers=workers)
        module.setup("fit")
        loader = module.train_dataloader()
        if not floats:
            loader.dataset.transform = torch.nn.Identity()  # As on a GPU: the device normalises.
        return forever(loader)

    return build


def image_folder(folder: Path, workers: int, floats: bool) -> Batches:
    """ImageFolder of torchvision."""
    dataset = datasets.ImageFolder(str(folder / "images/train"), transform(floats))
    return forever(DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0))


def webdataset(folder: Path, workers: int, floats: bool) -> Batches:
    """WebDataset over this package's shards."""
    import webdataset as wds

    shards = sorted(str(path) for path in (folder / "whole").glob("*.tar"))
    change = transform(floats)
    dataset = (
        wds.WebDataset(shards, shardshuffle=len(shards), seed=0)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(change, lambda target: target)
        .batched(BATCH)
    )
    return forever(wds.WebLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0))


def litdata(folder: Path, workers: int, floats: bool) -> Batches:
    """LitData's."""
    from litdata import StreamingDataLoader, StreamingDataset

    change = transform(floats)

    class Decoded(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return change(opened(sample["image"])), sample["label"]

    dataset = Decoded(str(folder / "lit"), shuffle=True, max_cache_size="60GB")
    return forever(StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0))


def streaming(folder: Path, workers: int, floats: bool) -> Batches:
    """Mosaic's Streaming."""
    from streaming import StreamingDataset

    change = transform(floats)

    class Decoded(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return change(opened(sample["image"])), sample["label"]

    dataset = Decoded(local=str(folder / "mds"), shuffle=True, batch_size=BATCH)
    return forever(DataLoader(dataset, BATCH, num_workers=workers, persistent_workers=workers > 0))


def spdl(folder: Path, workers: int, floats: bool) -> Batches:
    """SPDL's threads, with Pillow."""
    from spdl.pipeline import PipelineBuilder

    change, threads = transform(floats), max(1, workers)
    files = [str(path) for path in (folder / "images/train").rglob("*.jpg")]
    order = np.random.default_rng().permutation(len(files))

    def one(number: int) -> torch.Tensor:
        return change(opened(Path(files[number]).read_bytes()))

    builder = PipelineBuilder().add_source(order.tolist()).pipe(one, concurrency=threads).aggregate(BATCH)
    pipeline = builder.pipe(torch.stack).add_sink(4).build(num_threads=threads)

    def batches() -> Batches:
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=60)

    return batches()


LOADERS: dict[str, Callable[[Path, int, bool], Batches]] = {
    "ImageFolder, Pillow": image_folder,
    "WebDataset, Pillow": webdataset,
    "LitData, Pillow": litdata,
    "Mosaic Streaming, Pillow": streaming,
    "SPDL, Pillow": spdl,
    "cnnstrategies, Pillow": ours("whole", "pillow"),
    "cnnstrategies, simplejpeg": ours("whole", "simplejpeg"),
    "cnnstrategies, packed with --size 256, Pillow": ours("256", "pillow"),
    "cnnstrategies, packed with --size 256, simplejpeg": ours("256", "simplejpeg"),
}


def one(name: str, folder: Path, cores: int, floats: bool, seconds: float, results: Any) -> None:
    """Measure one loader in this process; the first batches, in which workers start, do not count."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    torch.set_num_threads(1)
    build, workers = LOADERS[name], 0 if cores == 1 else cores
    batches = build(folder, workers, floats)

    def following() -> Any:
        nonlocal batches
        try:
            return next(batches)
        except StopIteration:
            batches = build(folder, workers, floats)
            return next(batches)

    for _ in range(2 + 6 * workers):  # More than workers have ready.
        following()
    count, start = 0, time.perf_counter()
    while (now := time.perf_counter() - start) < seconds:
        batch = following()
        images = batch if isinstance(batch, torch.Tensor) else batch[0]
        assert images.shape[1:] == (3, SIZE, SIZE), images.shape
        assert images.dtype == (torch.float32 if floats else torch.uint8), images.dtype
        count += len(images)
    results.put(count / now)
    results.close()
    results.join_thread()
    os._exit(0)


def measure(folder: Path, rounds: int, seconds: float, names: Sequence[str] = tuple(LOADERS)) -> None:
    """Run these in turn, and add what they did to the results."""
    context = multiprocessing.get_context("fork")
    warm: tuple[Any, ...] = tuple(__import__(name) for name in ("webdataset", "litdata", "streaming", "spdl.pipeline"))
    assert warm
    for _ in range(rounds):
        for cores in (1, 2):
            for floats in (False, True):
                for name in names:
                    results = context.Queue()
                    process = context.Process(target=one, args=(name, folder, cores, floats, seconds, results))
                    process.start()
                    try:
                        rate = results.get(timeout=60)
                    except Exception as error:
                        process.kill()
                        print(f"{name}: {type(error).__name__}", flush=True)
                        continue
                    finally:
                        process.join()
                    row = {"name": name, "cores": cores, "floats": floats, "rate": rate}
                    with (folder / "results.jsonl").open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(f"{cores} {'floats' if floats else 'bytes':6} {name:50} {rate:7.0f}", flush=True)


def page(folder: Path, path: Path) -> None:
    """Write the page."""
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    files = list((folder / "images/train").rglob("*.jpg"))
    size = statistics.mean(file.stat().st_size for file in files[:200]) / 1000
    images_text = f"{len(files)} images of {size:.0f} kB on average, JPEG of quality {QUALITY}"
    lines = beginning("Loading images", __doc__, images_text)
    for cores in (1, 2):
        lines += [f"## {'One core' if cores == 1 else 'Two cores'}", ""]
        half = "lowest to highest | of ImageFolder"
        lines += [f"| Images per second | bytes | {half} | floats | {half} |", f"|{'---|' * 7}"]
        for name in LOADERS:
            cells = [name]
            for floats in (False, True):
                rates, base = (
                    [r["rate"] for r in rows if (r["name"], r["cores"], r["floats"]) == (of, cores, floats)]
                    for of in (name, next(iter(LOADERS)))
                )
                if not rates:
                    break
                middle = statistics.median(rates)
                cells += [f"{middle:.0f}", f"{min(rates):.0f} to {max(rates):.0f}"]
                cells.append(f"{middle / statistics.median(base):.2f}")
            lines += [f"| {' | '.join(cells)} |"] * (len(cells) == 7)
        lines.append("")
    rounds = sum((r["name"], r["cores"], r["floats"]) == (next(iter(LOADERS)), 1, True) for r in rows)
    lines += [f"Medians; rounds, in each of which all run in turn: {rounds}.", "", NOTES, ""]
    path.write_text("\n".join(lines))


NOTES = """\
ImageFolder shuffles all images and cannot resume within an epoch; WebDataset shuffles shards and 1000 images at a time,
and each worker has shards of its own; LitData and Streaming resume, as this package does. FFCV does not install
without the headers of OpenCV and libjpeg-turbo. SPDL's own decoder needs FFmpeg's libraries; here its threads call
Pillow and torchvision, which hold Python's lock in part."""


def beginning(title: str, doc: str | None, data: str) -> list[str]:
    """The first lines of a page: how a script measures, as the end of its docstring says it, and data with."""
    assert doc is not None
    system = f"{len(os.sched_getaffinity(0))} cores {processor()}, Linux {platform.release().partition('-')[0]}"
    return [
        f"# {title}", "", doc.split("\n\n")[-1].strip(), "",
        f"- {date.today()}; {system}",
        f"- Python {platform.python_version()}, {', '.join(versions())}",
        f"- {data}", "",
    ]  # fmt: skip


def versions() -> list[str]:
    """Return the names and versions of the compared packages."""
    versions_found = []
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions_found.append(f"{name} {version(name)}")
    return versions_found


def processor() -> str:
    """Its name."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(": ")[2] if names else platform.machine()


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "measure", "page"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=20000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--names", nargs="+", choices=LOADERS, default=tuple(LOADERS))
    parser.add_argument("--page", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    if options.what == "make":
        make(options.folder, options.images)
    elif options.what == "measure":
        measure(options.folder, options.rounds, options.seconds, options.names)
    else:
        page(options.folder, options.page)


if __name__ == "__main__":
    main()
