"""Compare the contents of some samples between the ranks and one process, which should load the same data set.

One device trains on the batches that the ranks have loaded, so the comparison of the runs does not show that a rank's
data set has other contents.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from cnnstrategies.data.division import checksum, has_map, samplers_of
from cnnstrategies.runtime.seeds import mixed_seed, restores_random_numbers, seed_all

SAMPLES = 16  # Largest number of samples that are compared.
SECONDS = 3.0  # Time after the first sample in which a process loads samples.
LONGEST_WAIT = 30.0  # Seconds for a sample after which nothing is compared.
MOST_CHARACTERS = 20  # Number of characters of a value that a message shows.
FILES = (
    "it may number classes in the order of os.listdir, which differs between hosts, or read another file of targets: "
    "sort names before they get numbers, and give all ranks the same files"
)
IMAGES = (
    "it may not be able to read a file, or prepare images with settings of its own: let the data set raise an error "
    "for such a file, and let no setting depend on the rank"
)

Leaf = list[Any]  # Checksum of a value, its text for a message, and whether it is a tensor or image.
Contents = Mapping[str, Any]  # Result of `contents_of`.


class SeededSamples(Dataset[Any]):
    """Descriptions of the samples of a data set, which are loaded with random numbers that depend on the index only.

    Args:
        dataset: The data set.
        times: How often each sample is loaded.
    """

    def __init__(self, dataset: Any, times: int) -> None:
        self._dataset, self._times = dataset, times

    def __getitem__(self, index: int) -> list[Leaf] | None:
        """Return the description of a sample; None if it is not the same each time."""
        descriptions = []
        for _ in range(self._times):
            seed_all(mixed_seed(index))
            descriptions.append([_described(leaf) for leaf in tree_leaves(self._dataset[index])])
        return descriptions[0] if all(other == descriptions[0] for other in descriptions) else None


def contents_of(loader: Any, times: int = 1) -> dict[str, Any] | None:
    """Describe the contents of a loader's data set by some of its samples, evenly spaced.

    A worker process loads the samples, so this process's data set is not changed.

    Args:
        loader: The loader.
        times: How often each sample is loaded. If it is not the same each time, nothing is compared.

    Returns:
        The number of samples, the structure of the data set, and descriptions of samples by their indices. None if
        they are not known.
    """
    if not has_map(loader):
        return None
    samples: dict[str, list[Leaf]] = {}
    try:
        size = len(loader.dataset)
        indices = sorted({number * size // SAMPLES for number in range(SAMPLES)})
        end = math.inf
        with restores_random_numbers():  # The loader draws a seed for its worker.
            descriptions = DataLoader(
                SeededSamples(loader.dataset, times),
                batch_size=None,
                sampler=indices,
                num_workers=1,
                multiprocessing_context="fork",
                timeout=LONGEST_WAIT,
                worker_init_fn=loader.worker_init_fn,
            )
            for index, description in zip(indices, descriptions, strict=False):
                if description is None:
                    return None
                samples[str(index)] = description
                end = min(end, time.monotonic() + SECONDS)
                if time.monotonic() > end:
                    break
    except Exception:  # The data set cannot load all samples on each rank, or not in a worker.
        return None
    return {"size": size, "structure": _structure(loader.dataset), "samples": samples}


def shares_data_set(loader: Any) -> bool:
    """Return whether a loader's sampler divides the indices of one data set, which then should be equal on all ranks.

    Otherwise each rank may have a data set of its own.
    """
    return any(isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1 for sampler in samplers_of(loader))


def other_contents(ranks: Mapping[int, Contents], alone: Contents | None) -> str:
    """Return which rank loads other contents of a sample than one process, as a text; empty if there is no such rank.

    A rank counts only if another rank has the contents of one process, and if a value agrees in all samples, which
    shows that they are the same samples. So data that are divided or drawn anew in each process do not count.

    Args:
        ranks: Results of :func:`contents_of` on the ranks.
        alone: Result in one process; None if it is not known.
    """
    if alone is None or any(
        contents[key] != alone[key] for contents in ranks.values() for key in ("size", "structure")
    ):
        return ""
    common = [index for index in alone["samples"] if all(index in contents["samples"] for contents in ranks.values())]
    expected = [alone["samples"][index] for index in common]
    loaded = {rank: [contents["samples"][index] for index in common] for rank, contents in sorted(ranks.items())}
    if expected not in loaded.values():
        return ""
    for rank, samples in loaded.items():
        if samples != expected and _same_samples(samples, expected):
            return _difference(rank, common, samples, expected)
    return ""


def _same_samples(first: Sequence[Sequence[Leaf]], second: Sequence[Sequence[Leaf]]) -> bool:
    """Return whether a value of the samples agrees in all samples and is not always the same."""
    if any(len(sample) != len(other) for sample, other in zip(first, second, strict=True)):
        return False
    columns = zip(zip(*first, strict=False), zip(*second, strict=False), strict=True)
    return any(column == other and len({leaf[0] for leaf in column}) > 1 for column, other in columns)


def _difference(
    rank: int, indices: Sequence[str], samples: Sequence[Sequence[Leaf]], expected: Sequence[Sequence[Leaf]]
) -> str:
    number = next(number for number, sample in enumerate(samples) if sample != expected[number])
    pairs = list(zip(samples[number], expected[number], strict=True))
    place = next(place for place, (leaf, other) in enumerate(pairs) if leaf != other)
    leaf, other = pairs[place]
    is_image = leaf[2] or other[2]
    kind = "image" if is_image and place == 0 else "target" if place == 1 else "value"
    values = f" ({leaf[1] or 'other values'}, and {other[1] or 'other values'} on one device)"
    count = sum(sample != wanted for sample, wanted in zip(samples, expected, strict=True))
    text = f"rank {rank} loads sample {indices[number]} with another {kind}{values if leaf[1] or other[1] else ''}"
    return f"{text}, {count} of {len(samples)} compared samples differ: {IMAGES if is_image else FILES}"


def _described(leaf: Any) -> Leaf:
    if isinstance(leaf, Tensor) and leaf.numel() == 1:
        return [checksum(leaf), str(leaf.item())[:MOST_CHARACTERS], False]
    if isinstance(leaf, Tensor):
        flat = leaf.detach().flatten()
        return [
            checksum(leaf),
            f"all {flat[0].item() + 0}" if len(flat) and bool(torch.eq(flat, flat[0]).all()) else "",
            True,
        ]
    if isinstance(leaf, (str, int, float)):
        return [checksum(leaf), repr(leaf)[:MOST_CHARACTERS], False]
    return [checksum(leaf), "", True]


def _structure(dataset: Any) -> list[Any]:
    """Return the classes of a data set and of the data sets inside it, with checksums of the indices of subsets."""
    structure: list[Any] = []
    while dataset is not None and len(structure) < 100:
        indices = checksum(list(dataset.indices)) if isinstance(dataset, Subset) else 0
        structure.append([type(dataset).__name__, indices])
        dataset = getattr(dataset, "dataset", None)
    return structure
