"""``cnnstrategies pack``: write a folder of images as tar files (shards), or check shards."""

import os

from cnnstrategies.commands.arguments.options import PackOptions
from cnnstrategies.data.shards.encoding import EncodingOptions
from cnnstrategies.data.shards.index import Index, check_contents, read_index
from cnnstrategies.data.shards.packing import pack
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.quantities import size_in_bytes

MOST_LISTED = 20  # Largest number of damaged images that are printed. The index file lists all of them.
SHRUNK_QUALITY = 90  # Default JPEG quality of images that are shrunk.


def main(options: PackOptions) -> None:
    """Pack images into shards, or check the checksums of shards, and print a summary."""
    if options.check is not None:
        index = read_index(options.check)
        check_contents(index)
        print(f"{options.check}: {_counted(index)}; all checksums match")
        return
    if options.source is None or options.out is None:
        raise ConfigurationError(
            "pack: a folder is missing; give a folder of images and a folder to write: cnnstrategies pack SOURCE OUT"
        )
    index = pack(options.source, options.out, _encoding(options), _workers(options.workers))
    for name, reason in list(index.damaged.items())[:MOST_LISTED]:
        print(f"{name} is damaged and was left out: {reason}")
    if len(index.damaged) > MOST_LISTED:
        print(
            f"... and {len(index.damaged) - MOST_LISTED} more; the key `damaged` in {options.out / 'index.json'} lists "
            "all damaged images"
        )
    print(
        f"{options.out}: {_counted(index)}, {len(index.class_names)} classes, {len(index.damaged)} damaged images left "
        "out"
    )


def _encoding(options: PackOptions) -> EncodingOptions:
    size, quality = options.size, options.quality
    shard_bytes = size_in_bytes(options.shard_size, "--shard_size")
    ranges = (
        ("size", size, 8, 65500),
        ("quality", quality, 1, 95),
        ("shard_size", shard_bytes, 10**6, 10**12),
        ("bits", options.bits, 8, 16),
    )
    for name, value, least, most in ranges:
        if value is not None and not least <= value <= most:
            raise ConfigurationError(f"--{name} {value} is outside the range from {least} to {most}")
    if quality is None and size is not None:
        quality = SHRUNK_QUALITY
    return EncodingOptions(size, quality, shard_bytes, options.bits)


def _workers(count: int | None) -> int:
    if count is not None and count < 1:
        raise ConfigurationError(f"--workers {count}: use 1 or more")
    return count or len(os.sched_getaffinity(0))


def _counted(index: Index) -> str:
    """Return a text with the total size, and with the numbers of images and shards of each subset, such as train."""
    size = sum(shard.size for part in index.parts.values() for shard in part.shards)
    parts = ", ".join(
        f"{len(part)} images for {name} in {len(part.shards)} shards" for name, part in index.parts.items()
    )
    return f"{parts}, {size / 1e6:.1f} MB"
