"""How a device computes a network, for modules that leave it open."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from cnnstrategies.runtime.compiling import compile_parts


class ComputeSettings(Callback):
    """Chooses how the devices compute, without a change to the module; ``cnnstrategies tune`` finds what is fastest.

    :class:`~cnnstrategies.ImageClassifier` has the first two as arguments of its own.

    Args:
        channels_last: Store the weights of convolutions with the channels innermost; convolutions turn the images.
        compile_backend: Compile what the module consists of, under ``hybrid_pipeline`` each stage of it, with this
            ``torch.compile`` backend, such as ``inductor``.
        float32_precision: Of products of float32 matrices: ``highest``, ``high`` (TF32) or ``medium``, as in
            ``torch.set_float32_matmul_precision``; left as it is by default.
        threads: Of the processor, for each rank's operations; left as they are by default.
    """

    def __init__(
        self,
        channels_last: bool = False,
        compile_backend: str | None = None,
        float32_precision: str | None = None,
        threads: int | None = None,
    ) -> None:
        self.channels_last = channels_last
        self.compile_backend = compile_backend
        self.float32_precision = float32_precision
        self.threads = threads

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.float32_precision is not None:
            torch.set_float32_matmul_precision(self.float32_precision)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.channels_last:
            pl_module.to(memory_format=torch.channels_last)
        if self.compile_backend is not None:
            parts = [child for child in pl_module.children() if any(True for _ in child.parameters())]
            compile_parts(trainer, parts, self.compile_backend)
