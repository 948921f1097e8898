"""Every operation that torch's own tests have samples for, with its operands at places.

    python -m tests.placed.sweep [NAME ...]

prints the operations that give another result than on one device, with three samples of each operation.
"""

import sys
import unittest
import warnings
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cnnstrategies.placed import Place, RefusedError
from tests.placed.placements import check

# Places of the first and the second tensor of a sample, and so on. A sample's place is chosen by its number, so that
# all kinds of places occur without running each sample at each place.
KINDS: list[list[Place]] = [[(0,)], [(0,), None], [(0,), (1,)], [None, (0, 1)], [(1,), (0, 1), None]]


def torch_operations() -> list[Any]:
    """Return torch's descriptions of operations, with samples."""
    # torch's samples import the package expecttest, but use it only in torch's own tests.
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def samples(operation: Any, limit: int) -> Iterator[Any]:
    """Yield samples of an operation whose operands are small dense tensors."""
    dtype = next((dtype for dtype in (torch.float64, torch.float32, torch.int64) if dtype in operation.dtypes), None)
    if dtype is None:
        return
    count = 0
    # The method `sample_inputs` would read the source of every caller, which takes most of the time under pytest.
    for sample in operation.sample_inputs_func(operation, "cpu", dtype, requires_grad=False):
        leaves = [leaf for leaf in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(leaf, Tensor)]
        if not leaves or any(leaf.layout != torch.strided or leaf.storage_offset() for leaf in leaves):
            continue
        yield sample
        count += 1
        if count == limit:
            return


def failures(limit: int, operations: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yield name and error of operations that give another result than on one device.

    Args:
        limit: Largest number of samples of an operation.
        operations: Some of :func:`torch_operations`.
    """
    number = 0
    for operation in operations:
        for sample in samples(operation, limit):
            number += 1
            at = KINDS[number % len(KINDS)]

            def program(value: Any, args: Any, kwargs: Any, operation: Any = operation) -> Any:
                return operation(value, *args, **kwargs)

            try:
                check(program, (sample.input, sample.args, sample.kwargs), at, world_size=2)
            except RefusedError as error:
                yield f"{operation.name} {operation.variant_test_name}", f"{at} refused: {error}"
            except Exception as error:
                yield f"{operation.name} {operation.variant_test_name}", f"{at} {type(error).__name__}: {error}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    named = [operation for operation in torch_operations() if operation.name in sys.argv[1:] or not sys.argv[1:]]
    for name, error in failures(3, named):
        print(name, "|", error.splitlines()[0][:200] if error else "", flush=True)
