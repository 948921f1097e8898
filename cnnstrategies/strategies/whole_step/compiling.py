"""Compile the stages of a network, if the module or a callback asks for it."""

from lightning.pytorch import LightningModule

from cnnstrategies.pipeline.division import Division
from cnnstrategies.strategies.hybrid_pipeline.contract import compile_backend_of


def compile_stages(module: LightningModule, division: Division) -> None:
    """Compile the stages of a division, if the module or a callback has a ``compile_backend``.

    A stage is compiled once for each microbatch size, when it runs for the first time.
    """
    backend = compile_backend_of(module)
    if backend is not None:
        division.compile(backend=backend, dynamic=False)
