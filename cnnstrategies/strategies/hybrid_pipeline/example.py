"""Find example inputs of a network, with which its cuts are chosen."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from cnnstrategies._lightning_private import first_loader
from cnnstrategies.pipeline.batch import Images
from cnnstrategies.pipeline.leaf_tracer import network_inputs
from cnnstrategies.pipeline.microbatches import CPU
from cnnstrategies.strategies.hybrid_pipeline.first_samples import (
    arguments_of_call,
    as_given,
    as_loaded,
    first_samples,
    repeated,
)
from cnnstrategies.strategies.hybrid_pipeline.network import module_at
from cnnstrategies.strategies.shadow import same_random_numbers

STEPS: dict[TrainerFn | None, str] = {
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


def example_inputs(module: LightningModule, path: str, size: int) -> Images | None:
    """Return inputs of the network for about ``size`` samples; None if they are not known.

    The inputs are the module's ``example_input_array``, or random numbers of the data module's ``image_shape``, or what
    the module's step passes to the network for the first samples of the data: ``training_step`` in ``fit``, and the
    step of the run's kind in other runs. The step runs on a copy of the module, up to the call of the network. No
    loader is iterated.

    Args:
        module: The module, which has a trainer.
        path: Path of the network.
        size: Number of samples. At least two samples are returned, because batch normalisation cannot train on one.
    """
    size = max(2, size)
    network = module_at(module, path)
    names = network_inputs(network)
    example = module.example_input_array
    arrays: tuple[Any, ...] = example if isinstance(example, tuple) else (example,)
    if len(arrays) == len(names) and all(isinstance(array, Tensor) for array in arrays):
        return repeated(as_given(arrays), size)
    shape = getattr(getattr(module.trainer, "datamodule", None), "image_shape", None)
    with same_random_numbers(CPU):
        if shape is not None and len(names) == 1:
            return torch.randn(size, *shape)
        batch = first_samples(first_loader(module.trainer), size)
        if batch is None:
            return None
        batch = as_loaded(module, batch)
        step = STEPS.get(module.trainer.state.fn, "training_step")
        arguments = arguments_of_call(module, path, network, step, batch, 0, CPU)
    if arguments is None or not all(isinstance(value, Tensor) for value in arguments):
        return None
    return as_given(arguments)
