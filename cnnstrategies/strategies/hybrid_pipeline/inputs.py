"""Which parts of a batch the network takes: found by running a step, on a copy of the module, up to the call."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.samples import count_samples
from cnnstrategies.pipeline.batch import Images
from cnnstrategies.pipeline.leaf_tracer import network_inputs
from cnnstrategies.strategies.hybrid_pipeline.batches import Form, flatten, take_apart
from cnnstrategies.strategies.hybrid_pipeline.first_samples import arguments_of_call, as_given
from cnnstrategies.strategies.hybrid_pipeline.placeholders import OF_THE_BATCH, described

STEPS = {
    RunningStage.TRAINING: "training_step",
    RunningStage.SANITY_CHECKING: "validation_step",
    RunningStage.VALIDATING: "validation_step",
    RunningStage.TESTING: "test_step",
    RunningStage.PREDICTING: "predict_step",
}


class Inputs:
    """Finds a module's inputs of its network, on a rank of the first stage."""

    def __init__(self, module: LightningModule, path: str, network: nn.Module, device: torch.device) -> None:
        self._module: Any = module
        self._path = path
        self._network = network
        self._device = device
        # For a step, a loader and a structure of batches the leaves that the network takes, in its arguments' order.
        self._known: dict[tuple[str, int, str], list[int]] = {}

    def take(self, batch: Any, dataloader: int) -> tuple[Images, tuple[Tensor, ...], Form]:
        """Take a batch that this rank has loaded apart: images, what else has a row for each sample, and its form."""
        trainer = self._module.trainer
        step = STEPS[trainer.state.stage or RunningStage.TRAINING]
        key = (step, dataloader, str(flatten(batch)[1]))
        if key not in self._known:
            with trainer.precision_plugin.forward_context():
                self._known[key] = self.leaves_of(step, batch, dataloader)
        return take_apart(batch, self._known[key])

    def of_a_batch(self, batch: Any) -> Images:
        """What ``training_step`` gives the network for a batch."""
        leaves, _ = flatten(batch)
        return as_given([leaves[index] for index in self.leaves_of("training_step", batch, 0)])

    def leaves_of(self, step: str, batch: Any, dataloader: int) -> list[int]:
        """The leaves of a batch that a step gives the network.

        Where the step does not come to the call, they are the batch's first tensors; if it does something else, it says
        so when it runs.
        """
        leaves, tree = flatten(batch)
        samples = count_samples(batch)
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        arguments = self.given(step, tree_unflatten(copies, tree), dataloader)
        if arguments is None:
            return self._first_tensors(batch, leaves)
        rows = {
            index: leaf
            for index, leaf in enumerate(copies)
            if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == samples
        }
        indices = [_place_of(value, rows) for value in arguments]
        for value, index in zip(arguments, indices, strict=True):
            if index is None:
                raise ConfigurationError(
                    f"{type(self._module).__name__}.{step} gives the network {described(value)} {OF_THE_BATCH}"
                )
        return [index for index in indices if index is not None]

    def _first_tensors(self, batch: Any, leaves: Sequence[Any]) -> list[int]:
        """As many of a batch's tensors as the network takes."""
        if leaves[0] is batch and not isinstance(batch, Tensor):
            raise ConfigurationError(
                f"a batch is a {type(batch).__name__}, whose tensors strategy hybrid_pipeline does not find: have "
                "the dataset or collate_fn return a tuple, list or dict of tensors with one row per sample"
            )
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.ndim]
        names = network_inputs(self._network)
        if len(tensors) < len(names):
            kinds = [f"Tensor{tuple(one.shape)}" if isinstance(one, Tensor) else type(one).__name__ for one in leaves]
            raise ConfigurationError(
                f"a batch is a {type(batch).__name__} of {', '.join(kinds)}, and the network takes "
                f"{' and '.join(names)}: strategy hybrid_pipeline takes batches of tensors with one row per sample, in "
                "tuples, lists or dicts"
            )
        return tensors[: len(names)]

    def given(self, step: str, batch: Any, dataloader: int) -> list[Any] | None:
        """What a step gives the network, in the order of the network's arguments.

        None where the step does not come to call it, or not as the network can be called; errors come again when the
        step runs in full.
        """
        return arguments_of_call(self._module, self._path, self._network, step, batch, dataloader, self._device)


def _place_of(value: Any, rows: dict[int, Tensor]) -> int | None:
    """Which of some tensors a value is, or a copy of it is."""
    same = [index for index, leaf in rows.items() if value is leaf]
    if not same and isinstance(value, Tensor):
        alike = {index: leaf for index, leaf in rows.items() if (leaf.shape, leaf.dtype) == (value.shape, value.dtype)}
        same = [index for index, leaf in alike.items() if torch.equal(value, leaf)]
    return same[0] if same else None
