"""The Trainer of the command line: Lightning's, with the subcommands that are ours."""

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from rich.console import Console
from rich.table import Table

from cnnstrategies.checkpoints.check import check_weights
from cnnstrategies.checkpoints.words import WORDS, find_checkpoint
from cnnstrategies.commands.front.refuse import write_anywhere
from cnnstrategies.commands.run.quiet import quieten
from cnnstrategies.deploy.export import Format, export
from cnnstrategies.deploy.quantize import quantize


class Trainer(LightningTrainer):
    """Lightning's Trainer with ``quantize`` and ``export``; a rank spawned with it speaks as the command line does."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        quieten()
        write_anywhere()

    def quantize(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        ckpt_path: Path,
        output: Path = Path("quantized.pt2"),
        calibration_batches: int = 16,
    ) -> None:
        """Quantise a trained checkpoint to int8 and print accuracy or mean IoU, size and time before and after.

        Args:
            model: Whose network is quantised.
            datamodule: Calibrates with training data, measures with validation data.
            ckpt_path: The checkpoint, or ``best`` or ``last``.
            output: The file to write; ``cnnstrategies.deploy.quantize.load_quantized`` loads it.
            calibration_batches: Number of training batches that set the ranges of the activations.

        Raises:
            ConfigurationError: The checkpoint is of another network.
        """
        self._load(model, ckpt_path)
        report = quantize(model, datamodule, output, calibration_batches)
        table = Table("", "float32", "int8", "ratio", title=f"Quantisation, batches of {report.batch_size} on the CPU")
        before, after = report.before, report.after
        table.add_row(report.metric, f"{before.quality:.4f}", f"{after.quality:.4f}", "")
        for name, old, new in (
            ("weights, MB", before.megabytes, after.megabytes),
            ("time per batch, ms", before.milliseconds, after.milliseconds),
        ):
            table.add_row(name, f"{old:.2f}", f"{new:.2f}", f"{new / old:.2f}")
        console = Console(soft_wrap=True)
        console.print(table)
        if not report.lowered:
            console.print("This processor has no int8 kernels in oneDNN: the time is that of dequantised arithmetic.")
        console.print(f"Saved: {output}; load it with cnnstrategies.deploy.quantize.load_quantized({str(output)!r})")

    def export(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        ckpt_path: Path,
        output: Path = Path("exported"),
        format: Format = "torch_export",
        int8: bool = False,
        calibration_batches: int = 16,
    ) -> None:
        """Write a trained checkpoint for use without this package, and print how far its logits are from it.

        Args:
            model: Whose network is exported.
            datamodule: Compares with validation data, and says what is done to images and what classes are called.
            ckpt_path: The checkpoint, or ``best`` or ``last``.
            output: The folder to make.
            format: ``safetensors``, ``torch_export`` or ``onnx``.
            int8: Quantise weights and activations to int8 before; not for ``safetensors``.
            calibration_batches: Number of training batches that set the ranges of the activations, with ``int8``.

        Raises:
            ConfigurationError: The checkpoint is of another network, or the network cannot be exported.
        """
        self._load(model, ckpt_path)
        found = export(model, datamodule, output, format, int8, calibration_batches)
        console = Console(soft_wrap=True)
        console.print(str(found))
        console.print(f"Saved: {found.file}, with export.json beside it")

    def _load(self, model: LightningModule, ckpt_path: Path) -> None:
        path = find_checkpoint(str(ckpt_path), self) if str(ckpt_path) in WORDS else ckpt_path
        check_weights(model, path, weights_only=True)
        checkpoint = self.strategy.checkpoint_io.load_checkpoint(path, weights_only=True)
        model.load_state_dict(checkpoint["state_dict"])
