"""Save the batches that the ranks load, and build global batches from them, with which one device repeats the run."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision
from lightning.pytorch.plugins.precision import Precision as PrecisionPlugin
from typing_extensions import override

from cnnstrategies.models.joined_batches import joined

Precision = Literal["64-true", "32-true", "bf16-mixed", "16-mixed"]  # Lightning's names.
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


class BatchKeeper(PrecisionPlugin):
    """Precision plugin that saves each batch as the loader returns it.

    Lightning passes each batch to the precision plugin before the module's hooks and the strategy can change it, on
    every rank and under every strategy.
    """

    folder: Path | None = None  # Folder in which batches are saved; None if they are not saved.
    writes = True  # Whether this rank writes the files. Otherwise it only helps another rank to read the values.
    keeps_generator = False  # Whether the state of torch's generator is saved with each batch.
    count = 0  # Number of saved batches.
    generator = torch.empty(0, dtype=torch.uint8)  # State of torch's CPU random generator when the last batch arrived.

    @override
    def convert_input(self, data: Any) -> Any:
        self.generator = torch.get_rng_state()
        if self.folder is not None:
            torch.save(data, self.folder / f"{self.count}.pt" if self.writes else io.BytesIO())
            if self.keeps_generator:
                torch.save(self.generator, self.folder / f"{self.count}.generator")
            self.count += 1
        return super().convert_input(data)


class DoubleBatchKeeper(BatchKeeper, DoublePrecision):
    """Precision plugin for float64 that saves each batch like :class:`BatchKeeper`."""


class MixedBatchKeeper(BatchKeeper, MixedPrecision):
    """Precision plugin for mixed precision on CPUs that saves each batch like :class:`BatchKeeper`."""


def keeper_of(precision: Precision) -> BatchKeeper:
    """Return the plugin with which a run trains in a precision."""
    match precision:
        case "64-true":
            return DoubleBatchKeeper()
        case "32-true":
            return BatchKeeper()
        case "bf16-mixed":
            return MixedBatchKeeper(precision, "cpu")
        case "16-mixed":
            return MixedBatchKeeper(precision, "cpu", torch.amp.GradScaler("cpu"))


class GlobalBatches:
    """Data loader of global batches. A global batch is joined from the saved batches of all ranks, in rank order.

    If the ranks have saved states of torch's CPU generator, each batch also restores a state, so that the steps draw
    the same random numbers.

    Args:
        folders: Folder of each rank's batches, in rank order.
        ends: For each epoch, the number of batches that a rank has loaded from the start of the run to the epoch's end.
        length: Number of batches in an epoch; None if the number is not known. Learning rate schedules may need it.
    """

    def __init__(self, folders: Sequence[Path], ends: Sequence[int], length: int | None) -> None:
        self._folders = folders
        self._ends = ends
        self._length = length
        self._next = 0

    def __iter__(self) -> Iterator[Any]:
        # In a validation, some ranks may have fewer batches than others.
        while parts := [file for folder in self._folders if (file := folder / f"{self._next}.pt").exists()]:
            generator = self._folders[0] / f"{self._next}.generator"
            self._next += 1
            if generator.exists():
                torch.set_rng_state(torch.load(generator))
            yield joined([torch.load(part, weights_only=False) for part in parts])
            if self._next in self._ends:
                return

    def __len__(self) -> int:
        if self._length is None:
            # Lightning expects a TypeError from a loader of unknown length.
            raise TypeError("the ranks' loaders have no length")
        return self._length


class ValidationBatches:
    """Data loader of the global batches with which the ranks have validated.

    Args:
        folder: Folder of one of the user's loaders. It has a folder for each validation, with the folders of the ranks.
    """

    number = 0  # Number of the validation whose batches are loaded, beginning with 0.

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __iter__(self) -> Iterator[Any]:
        folders = rank_folders(self._folder / str(self.number))
        return iter(GlobalBatches(folders, (), None)) if folders else iter(())

    def __len__(self) -> int:
        return max((len([*folder.glob("*.pt")]) for folder in rank_folders(self._folder / "0")), default=0)


def rank_folders(folder: Path) -> list[Path]:
    """Return the folders of the ranks that have saved batches in a folder, in rank order."""
    return sorted((file.parent for file in folder.glob("*/0.pt")), key=lambda folder: int(folder.name))
