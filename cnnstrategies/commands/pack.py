"""``cnnstrategies pack``: images into shards."""

import argparse
import os
from collections.abc import Sequence

from cnnstrategies.commands.arguments.options import QUALITY, pack_parser
from cnnstrategies.data.shards.encoding import EncodingOptions
from cnnstrategies.data.shards.index import Index, check_contents, read_index
from cnnstrategies.data.shards.packing import pack
from cnnstrategies.errors import ConfigurationError

MOST_LISTED = 20  # Damaged images; the index has all of them.


def main(args: Sequence[str]) -> None:
    """Pack images, or check packed ones, and say what was done."""
    given = pack_parser().parse_args(args[1:])
    if given.check is not None:
        index = read_index(given.check)
        check_contents(index)
        print(f"{given.check}: {_counted(index)}; every checksum is right")
        return
    if given.source is None or given.out is None:
        raise ConfigurationError("pack: name what to pack and the folder to make: cnnstrategies pack SOURCE OUT")
    options = _options(given)
    index = pack(given.source, given.out, options, _workers(given.workers))
    for name, reason in list(index.damaged.items())[:MOST_LISTED]:
        print(f"left out, damaged: {name}: {reason}")
    if len(index.damaged) > MOST_LISTED:
        print(f"... and {len(index.damaged) - MOST_LISTED} more: `damaged` in {given.out / 'index.json'}")
    print(f"{given.out}: {_counted(index)}, {len(index.class_names)} classes, {len(index.damaged)} damaged left out")


def _options(given: argparse.Namespace) -> EncodingOptions:
    ranges = (("size", given.size, 8, 65500), ("quality", given.quality, 1, 95), ("shard_mb", given.shard_mb, 1, 10**6))
    for name, value, least, most in ranges:
        if value is not None and not least <= value <= most:
            raise ConfigurationError(f"--{name} {value} is outside {least} to {most}")
    quality = QUALITY if given.quality is None and given.size is not None else given.quality
    return EncodingOptions(given.size, quality, given.shard_mb * 10**6)


def _workers(given: int | None) -> int:
    if given is not None and given < 1:
        raise ConfigurationError(f"--workers {given}: at least 1 is needed")
    return given or len(os.sched_getaffinity(0))


def _counted(index: Index) -> str:
    """How many images and shards each part has."""
    size = sum(shard.size for part in index.parts.values() for shard in part.shards)
    parts = ", ".join(
        f"{len(part)} images for {name} in {len(part.shards)} shards" for name, part in index.parts.items()
    )
    return f"{parts}, {size / 1e6:.1f} MB"
