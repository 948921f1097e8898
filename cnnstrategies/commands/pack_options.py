"""What ``cnnstrategies pack`` takes."""

import argparse
from pathlib import Path

QUALITY, SHARD_MB = 90, 256


def parser() -> argparse.ArgumentParser:
    """Its parser."""
    result = argparse.ArgumentParser(
        prog="cnnstrategies pack",
        description="Put images into tar files (shards) with an index, for ShardedImageDataModule; WebDataset's tools "
        "read them too. Interrupted, the same command goes on after the shards that are whole.",
        allow_abbrev=False,
    )
    result.add_argument(
        "source",
        nargs="?",
        help="folder of images, as ImageFolderDataModule reads it, or a data module's name or import "
        "path (SegmentationFolderDataModule for images with masks)",
    )
    result.add_argument("out", nargs="?", type=Path, help="folder to make")
    result.add_argument("--init_args", default="{}", help="arguments of the data module, as YAML: '{root: datasets}'")
    result.add_argument("--size", type=int, help="shrink larger images to this shorter side (default: as they are)")
    result.add_argument(
        "--quality", type=int, help=f"make every image a JPEG of this quality, 1 to 95 (default with --size: {QUALITY})"
    )
    result.add_argument("--shard_mb", type=int, default=SHARD_MB, help=f"MB of a shard, about (default: {SHARD_MB})")
    result.add_argument("--workers", type=int, help="shards written at the same time (default: one per core)")
    result.add_argument("--check", type=Path, metavar="FOLDER", help="compare packed shards with their checksums")
    return result
