"""The images that a network is most wrong about: found batch by batch, and drawn."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

COLUMNS = 5
MOST = 25  # That are kept and drawn.


@dataclass(frozen=True)
class Mistakes:
    """Images that are taken for something else, the worst first, and never more than :data:`MOST`.

    Attributes:
        indices: Their places in the data set (n,).
        rows: Loss, true class, predicted class, and the probabilities of both (n, 5). With labels or numbers: how far
            the prediction is off, its column twice, the target, and the prediction.
    """

    indices: Tensor
    rows: Tensor

    @staticmethod
    def none() -> "Mistakes":
        """Before the first batch."""
        return Mistakes(torch.empty(0, dtype=torch.int64), torch.empty(0, 5))

    @staticmethod
    def of_batch(indices: Sequence[int], logits: Tensor, targets: Tensor) -> "Mistakes":
        """Those of a batch.

        Args:
            indices: Places of its images.
            logits: (N, classes).
            targets: Classes (N,).
        """
        logs = logits.float().log_softmax(dim=1)
        best, predicted = logs.max(dim=1)
        true = logs.gather(1, targets[:, None])[:, 0]
        rows = torch.stack([(-true).nan_to_num(torch.inf), targets.float(), predicted.float(), true.exp(), best.exp()])
        wrong = (predicted != targets).cpu()
        return Mistakes(torch.tensor(indices)[wrong], rows.T.cpu()[wrong]).worst()

    @staticmethod
    def of_values(indices: Sequence[int], values: Tensor, targets: Tensor) -> "Mistakes":
        """Those of a batch with labels or numbers: of each image the one that is furthest off.

        Args:
            indices: Places of its images.
            values: What is predicted (N, columns).
            targets: What is true (N, columns).
        """
        off, column = (values.float() - targets).abs().nan_to_num(torch.inf).max(dim=1, keepdim=True)
        rows = [off, column, column, targets.gather(1, column), values.gather(1, column)]
        return Mistakes(torch.tensor(indices), torch.cat([row.float() for row in rows], dim=1).cpu()).worst()

    def worst(self) -> "Mistakes":
        """The worst of these; of equal ones the first in the data set, however they came here."""
        loss = -self.rows[:, 0]
        order = sorted(range(len(loss)), key=lambda place: (float(loss[place]), int(self.indices[place])))[:MOST]
        return Mistakes(self.indices[order], self.rows[order])

    def and_those(self, others: "Mistakes") -> "Mistakes":
        """The worst of both."""
        return Mistakes(torch.cat([self.indices, others.indices]), torch.cat([self.rows, others.rows])).worst()


def write_mistakes(
    mistakes: Mistakes, names: Sequence[str], sample_name: Callable[[int], str], path: Path, values: bool = False
) -> None:
    """Write them as CSV; ``values`` says that they are of :meth:`Mistakes.of_values`."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        classes = ["true class", "its probability", "predicted class", "its probability", "loss"]
        writer.writerow(["sample", *(["target", "true", "predicted", "difference"] if values else classes)])
        for index, (loss, true, predicted, *both) in zip(
            mistakes.indices.tolist(), mistakes.rows.tolist(), strict=True
        ):
            first, second = (f"{one:.6f}" for one in both)
            said = [second] if values else [names[int(predicted)], second]
            writer.writerow([sample_name(index), names[int(true)], first, *said, f"{loss:.4f}"])


def draw_mistakes(mistakes: Mistakes, images: Tensor, names: Sequence[str], path: Path, values: bool = False) -> None:
    """Draw them, the worst first, with what they are and what they were taken for.

    Args:
        mistakes: At least one.
        images: As the network sees them, uint8 (n, C, H, W).
        names: Of the classes, labels or numbers.
        path: The PNG file.
        values: They are of :meth:`Mistakes.of_values`.
    """
    columns = min(COLUMNS, len(images))
    lines = -(-len(images) // columns)
    figure = Figure(figsize=(2.1 * columns, 2.5 * lines), layout="constrained")
    cells = figure.subplots(lines, columns, squeeze=False).flatten()
    for cell in cells:
        cell.set_axis_off()
    for cell, image, (_, true, predicted, first, share) in zip(cells, images, mistakes.rows.tolist(), strict=False):
        pixels = image.permute(1, 2, 0).numpy()
        cell.imshow(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels, cmap="gray", vmin=0, vmax=255)
        name, said = _short(names[int(true)]), f"taken for {_short(names[int(predicted)])}, {100 * share:.0f} %"
        if values:
            name, said = f"{name}: {first:.3g}", f"predicted {share:.3g}"
        cell.set_title(f"{name}\n{said}", fontsize=8)
    figure.savefig(path, dpi=120)


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:17]}…"
