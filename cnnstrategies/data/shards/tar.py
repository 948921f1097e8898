"""Entries of tar files as WebDataset reads them: for each image ``key.jpg`` and ``key.cls``."""

import tarfile

BLOCK = tarfile.BLOCKSIZE
OWNER = slice(265, 281)  # Of a header: the first 16 bytes of the owner's name, which here is the packing.
END = b"\0" * (2 * BLOCK)


def entry(name: str, content: bytes, packing: str) -> bytes:
    """A file in a tar file.

    Args:
        name: Its name.
        content: What it contains.
        packing: Written into the owner's name: with it every entry says which index it belongs to.
    """
    info = tarfile.TarInfo(name)
    info.size, info.uname, info.mode = len(content), packing, 0o644
    return info.tobuf(tarfile.USTAR_FORMAT) + content + b"\0" * (-len(content) % BLOCK)
