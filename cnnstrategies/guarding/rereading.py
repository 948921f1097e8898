"""Comparison of a checkpoint file with the checkpoint in memory from which it was written."""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from cnnstrategies.guarding.digests import digests


def digests_in(checkpoint: Mapping[str, Any]) -> dict[str, int]:
    """Return the checksums of all dense tensors of a checkpoint, by their places in its containers."""
    leaves = tree_flatten_with_path(dict(checkpoint))[0]
    dense = {keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided}
    return dict(zip(dense, digests(list(dense.values())).tolist(), strict=True))


def fault_of(path: Path, written: Mapping[str, int]) -> str | None:
    """Return why a file does not contain what was written; None if it does.

    Args:
        path: The file, which ``torch.save`` has written.
        written: Checksums of the checkpoint in memory, see :func:`digests_in`.
    """
    try:
        mapped = zipfile.is_zipfile(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        # A file with objects of other classes is not loaded, because its code would run.
        return None if "weights_only" in str(error) and zipfile.is_zipfile(path) else f"cannot be read ({error})"
    except Exception as error:
        return f"cannot be read ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    read = digests_in(content)
    wrong = [name for name in (*written, *read) if written.get(name) != read.get(name)]
    return f"has another value of {wrong[0]} than the run had in memory" if wrong else None
