"""Settings of how devices compute, for modules that have no such arguments."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from cnnstrategies.runtime.compiling import compile_parts


class ComputeSettings(Callback):
    """Sets how the devices compute, without a change to the module; ``cnnstrategies tune`` finds the fastest settings.

    :class:`~cnnstrategies.ImageClassifier` has arguments of its own for the first two settings.

    Args:
        channels_last: Store the weights of convolutions with the channels innermost. The convolutions convert the
            images themselves.
        compile_backend: Compile the module's children with this ``torch.compile`` backend, such as ``inductor``; under
            ``hybrid_pipeline`` each stage is compiled.
        float32_precision: Precision of products of float32 matrices: ``highest``, ``high`` (TF32) or ``medium``, as in
            ``torch.set_float32_matmul_precision``. By default it is not changed.
        threads: Number of CPU threads for each rank's operations. By default it is not changed.
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
