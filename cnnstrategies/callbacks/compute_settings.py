"""Callback for compute settings: memory format, compilation, float32 precision and number of CPU threads."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from cnnstrategies.runtime.compiling import compile_parts


class ComputeSettings(Callback):
    """Callback that applies compute settings to any module, without a change to the module's code.

    ``cnnstrategies tune`` finds the fastest settings. :class:`~cnnstrategies.ImageClassifier` also has arguments
    ``channels_last`` and ``compile_backend`` of its own.

    Args:
        channels_last: Whether to store the weights of convolutions in torch's ``channels_last`` memory format. The
            convolutions convert the images to this format by themselves.
        compile_backend: Backend of ``torch.compile``, such as ``inductor``. The module's children are compiled, or each
            stage under ``hybrid_pipeline``. By default nothing is compiled.
        float32_precision: Precision of float32 matrix multiplications: ``highest``, ``high`` (TF32) or ``medium``; see
            ``torch.set_float32_matmul_precision``. By default torch's setting is not changed.
        threads: Number of CPU threads for each rank's operations. By default torch's setting is not changed.
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
