"""Find out from the first samples whether a stream divides its samples among processes and workers itself."""

import pickle
import zlib
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

from torch.utils._pytree import tree_leaves

from cnnstrategies.data.division import LEAVES, checksum
from cnnstrategies.errors import ConfigurationError

FIRST = 8  # Number of samples of each worker that are compared.
ROW = FIRST * (1 + LEAVES)
PLURALS = {"process": "processes", "worker": "workers"}

# Numbers that describe the first samples of one worker; see `describe_samples`.
Row = Sequence[int]


class StreamDivision(NamedTuple):
    """Whether a stream divides its samples itself.

    Attributes:
        by_process: Whether the samples of the processes differ.
        by_worker: Whether the samples of the workers of a process differ.
    """

    by_process: bool
    by_worker: bool


def describe_samples(samples: Sequence[Any]) -> list[int]:
    """Describe the first samples of a stream by numbers, for :func:`find_division`.

    Returns:
        :data:`ROW` numbers. For each sample: 1, and the checksums of its first leaves. Missing samples and leaves have
        zeros.
    """
    row = []
    for sample in samples[:FIRST]:
        checksums = [_checksum(leaf) for leaf in tree_leaves(sample)[:LEAVES]]
        row += [1, *checksums, *[0] * (LEAVES - len(checksums))]
    return row + [0] * (ROW - len(row))


def _checksum(value: Any) -> int:
    known = checksum(value)
    if known:
        return known
    try:
        return zlib.crc32(pickle.dumps(value)) or 1
    except Exception:  # An object that cannot be pickled is not compared.
        return 0


def find_division(rows: Sequence[Sequence[Row]], replicas: Sequence[int], name: str) -> StreamDivision:
    """Return whether a stream divides its samples among the processes, and among the workers.

    All workers have read the stream with equal random seeds.

    Args:
        rows: For each process and each of its workers, the result of :func:`describe_samples`.
        replicas: For each process, the number of its part of the batches. Processes with equal numbers, such as those
            that work on parts of the same image, have the same samples.
        name: Name of the stream's class, for error messages.

    Raises:
        ConfigurationError: Some processes or workers read the same samples, and others do not.
    """
    if not any(row[0] for process in rows for row in process):
        return StreamDivision(by_process=False, by_worker=False)
    workers = [_relation(process) for process in rows]
    if len({relation for relation in workers if relation is not None}) > 1 or "mixed" in workers:
        raise ConfigurationError(
            f"some workers of the loader of {name} read the same samples and others do not: let {name} divide its "
            "samples among all workers by torch.utils.data.get_worker_info(), or among none, or set num_workers to 1"
        )
    by_worker = "different" in workers
    joined = [[number for row in process for number in row] for process in rows]
    of_replica = {replica: joined[replicas.index(replica)] for replica in replicas}
    relation = _relation(joined)
    if relation == "mixed" and _relation(list(of_replica.values())) == "different":
        same = all(_same(row, of_replica[replica]) for row, replica in zip(joined, replicas, strict=True))
        relation = "different" if same else "mixed"
    if relation == "mixed":
        pairs = combinations(range(len(joined)), 2)
        first, second = next(pair for pair in pairs if _same(joined[pair[0]], joined[pair[1]]))
        raise ConfigurationError(
            f"processes {first} and {second} read the same samples of {name}, and other processes read other samples: "
            f"let {name} divide its samples among all {len(joined)} processes, or among none"
        )
    return StreamDivision(by_process=relation == "different", by_worker=by_worker)


def _relation(rows: Sequence[Row]) -> str | None:
    """Return whether all rows describe the "same" samples, all "different" ones, or "mixed"; None for a single row."""
    pairs = [_same(first, second) for first, second in combinations(rows, 2)]
    if not pairs:
        return None
    return "same" if all(pairs) else "mixed" if any(pairs) else "different"


def _same(first: Row, second: Row) -> bool:
    """Whether two rows describe the same samples.

    If all checksums are equal, the samples are the same. If a leaf such as a file's name is equal in all samples and
    differs from sample to sample, the samples are the same as well: another leaf may have noise from a generator that
    is not seeded. Rows without samples are different.
    """
    samples = [
        (first[start : start + 1 + LEAVES], second[start : start + 1 + LEAVES])
        for start in range(0, len(first), 1 + LEAVES)
        if first[start] or second[start]
    ]
    if not samples or any(left[0] != right[0] for left, right in samples):
        return False
    leaves = [[(left[1 + leaf], right[1 + leaf]) for left, right in samples] for leaf in range(LEAVES)]
    known = [pairs for pairs in leaves if all(left and right for left, right in pairs)]
    equal = [pairs for pairs in known if all(left == right for left, right in pairs)]
    if len(equal) == len(known):
        return bool(known)
    return len(samples) > 1 and any(len(set(pairs)) == len(pairs) for pairs in equal)


def same_start(first: Row, second: Row) -> bool:
    """Whether two results of :func:`describe_samples` describe the same samples."""
    return _same(first, second) or not (any(first) or any(second))


def describe_division(division: StreamDivision, name: str, processes: int, workers: int) -> str:
    """Return a text about the division of a stream, for the start panel.

    Args:
        division: Whether the stream divides its samples itself.
        name: Name of the stream's class.
        processes: Number of processes.
        workers: Number of workers of each process.
    """
    numbers = {"process": (division.by_process, processes), "worker": (division.by_worker, workers)}
    many = {kind: (is_own, count) for kind, (is_own, count) in numbers.items() if count > 1}
    of_stream = " and ".join(f"{count} {PLURALS[kind]}" for kind, (is_own, count) in many.items() if is_own)
    here = " x ".join(f"{count} {PLURALS[kind]}" for kind, (is_own, count) in many.items() if not is_own)
    texts = [f"{name} divides its samples among {of_stream} itself"] if of_stream else []
    if here:
        texts.append(f"each of {here} reads all of {'these samples' if of_stream else name} and keeps its part")
    return "; ".join(texts) or f"{name} is read by one process"
