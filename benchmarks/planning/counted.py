"""Count the bytes of a process's CPU tensors in torch's own allocator, exactly and at all times."""

import ctypes
import subprocess
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("counting_allocator.cpp")


def build(folder: Path) -> Path:
    """Compile the allocator, if the folder does not have it, and return the library's path. Needs a C++ compiler."""
    library = folder / f"counting_allocator_{torch.__version__}.so"
    if not library.exists():
        torch_folder = Path(torch.__file__).parent
        options = ["-O2", "-shared", "-fPIC", "-std=c++20", f"-I{torch_folder / 'include'}"]
        options += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        libraries = [f"-L{torch_folder / 'lib'}", "-lc10"]
        subprocess.run(["g++", *options, str(SOURCE), "-o", str(library), *libraries], check=True)
    return library


class Counted:
    """The counter of this process, which begins with the first object of this class.

    Args:
        library: Path of the library.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("bytes_now", "bytes_most"):
            getattr(self._library, name).restype = ctypes.c_long
        self._library.set_limit.argtypes = [ctypes.c_long]
        self._library.install()

    @property
    def now(self) -> int:
        """Bytes of the CPU tensors that exist."""
        return int(self._library.bytes_now())

    @property
    def most(self) -> int:
        """Largest number of bytes since the start, or since `forget`."""
        return int(self._library.bytes_most())

    def forget(self) -> None:
        """Begin to look for the largest number again."""
        self._library.forget_most()

    def limit(self, size: int) -> None:
        """Refuse allocations that exceed a number of bytes, as ``torch.OutOfMemoryError``; 0 removes the limit."""
        self._library.set_limit(size)
