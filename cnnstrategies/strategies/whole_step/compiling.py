"""Compile the stages of a network, if the module or a callback asks for it."""

from lightning.pytorch import LightningModule

from cnnstrategies._lightning_private import is_compiled_whole
from cnnstrategies._torch_private import is_compiled
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.division import Division
from cnnstrategies.strategies.hybrid_pipeline.contract import compile_backend_of
from cnnstrategies.strategies.whole_step.network import module_at


def compile_stages(module: LightningModule, division: Division) -> None:
    """Compile the stages of a division, if the module or a callback has a ``compile_backend``.

    A stage is compiled once for each microbatch size, when it runs for the first time.
    """
    backend = compile_backend_of(module)
    if backend is not None:
        division.compile(backend=backend, dynamic=False)


def refuse_compiled(module: LightningModule, path: str) -> None:
    """Refuse a module or a network that the user has compiled as a whole. Parts of a network may be compiled.

    torch does not compile code that follows the rules for placed tensors, so it would run as without compilation.

    Args:
        module: The module.
        path: Path of the network.

    Raises:
        ConfigurationError: The module or the network is compiled, or a backend does not work for stages.
    """
    compile_backend_of(module)
    name = type(module).__name__
    for label, compiled in (
        (name, is_compiled_whole(module)),
        (f"{name}.{path}", is_compiled(module_at(module, path))),
    ):
        if compiled:
            raise ConfigurationError(
                f"{label.rstrip('.')} is compiled as a whole, but each rank runs only a stage of the network: leave "
                "out torch.compile, and set the callback ComputeSettings(compile_backend='inductor'), which compiles "
                "each stage"
            )
