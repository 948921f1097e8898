"""Compile the stages of a network, if the module or a callback asks for it."""

from lightning.pytorch import LightningModule

from cnnstrategies.pipeline.division import Division
from cnnstrategies.pipeline.stage import check_backend
from cnnstrategies.strategies.hybrid_pipeline.example_inputs import is_attached


def compile_backend_of(module: LightningModule) -> str | None:
    """Return the backend of ``torch.compile`` for the stages; None if the stages are not compiled.

    The backend is the ``compile_backend`` of the module, or else of the first callback that has one.

    Raises:
        ConfigurationError: The backend does not work for stages.
    """
    callbacks = module.trainer.callbacks if is_attached(module) else []  # type: ignore[attr-defined]
    backends = [getattr(owner, "compile_backend", None) for owner in (module, *callbacks)]
    backend = next((backend for backend in backends if backend is not None), None)
    check_backend(backend)
    return backend


def compile_stages(module: LightningModule, division: Division) -> None:
    """Compile the stages of a division, if the module or a callback has a ``compile_backend``.

    A stage is compiled once for each microbatch size, when it runs for the first time.
    """
    backend = compile_backend_of(module)
    if backend is not None:
        division.compile(backend=backend, dynamic=False)
