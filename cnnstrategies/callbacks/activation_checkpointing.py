"""Callback that computes activations again in the backward, so that training needs less memory."""

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import fx, nn
from typing_extensions import override

from cnnstrategies._lightning_private import is_compiled_whole
from cnnstrategies._torch_private import is_compiled
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.division import Division
from cnnstrategies.pipeline.recomputed_forward import RecomputedForward
from cnnstrategies.pipeline.rehearsal import REHEARSED, refusal, rehearse, rehearsed
from cnnstrategies.pipeline.tracing import cut_positions, decide_by_shapes, seals, trace_open
from cnnstrategies.planning.costs import GraphCosts, format_bytes
from cnnstrategies.planning.measure_bytes import bytes_of
from cnnstrategies.planning.measure_nodes import profile
from cnnstrategies.planning.recompute import choose_segments
from cnnstrategies.strategies.hybrid_pipeline.example_inputs import example_inputs, on_device_of
from cnnstrategies.strategies.hybrid_pipeline.network import find_network, module_at
from cnnstrategies.strategies.protocol import facts_of

MEASURED = 2  # Number of samples with which activations are measured. BatchNorm cannot train on one sample.


class ActivationCheckpointing(Callback):
    """Callback that keeps few activations for the backward, and computes the others again.

    The network is cut into segments. After the forward, only the values between segments and the activations of the
    last segment are in memory. The backward runs the forward of each other segment again, with
    ``torch.utils.checkpoint``. A step takes about a third longer, and the weights are the same: dropout draws the same
    numbers, and BatchNorm updates its running statistics once.

    The callback works on one device and with every strategy in which each process trains the whole network: ``ddp``,
    ``ddp_balanced``, compressed DDP, ``spatial``, and parameter servers. The modules, their hooks and the names in
    checkpoints do not change. Hooks of modules inside of the network run in both forwards. The strategy
    ``hybrid_pipeline`` has an option ``activation_checkpointing`` of its own.

    Args:
        cuts: Names of the modules after which the network is cut. By default the cuts are chosen at the start of
            ``fit`` so that the fewest bytes of activations are in memory.
        submodule: Path of the network, such as ``model.backbone``. By default the network is the submodule with all
            parameters, as under ``hybrid_pipeline``.

    Raises:
        ConfigurationError: The network cannot be cut, is compiled, or the strategy divides its parameters.
    """

    def __init__(self, cuts: Sequence[str] | None = None, submodule: str | None = None) -> None:
        if cuts is not None and not cuts:
            raise ConfigurationError("cuts=[]: name at least one module, or leave cuts out")
        self.cuts = cuts
        self.submodule = submodule
        self._forward: RecomputedForward | None = None
        self._costs: GraphCosts | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the divided network, because a copy of a trainer divides its own network."""
        return {**vars(self), "_forward": None}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        facts, name = facts_of(trainer.strategy), type(self).__name__
        if facts.step_kind == "stages":
            raise ConfigurationError(
                f"{name}: strategy {facts.display_name} recomputes the activations of its stages itself: leave out the "
                "callback, and set the strategy's option activation_checkpointing: except_last"
            )
        if facts.shards_parameters:
            raise ConfigurationError(
                f"{name}: strategy {facts.display_name} divides the parameters, and the callback cannot run a forward "
                "again without them: leave it out, and use the strategy's own option, such as FSDPStrategy's "
                "activation_checkpointing_policy"
            )

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path = find_network(pl_module, self.submodule)
        network = module_at(pl_module, path)
        self._check(pl_module, network)
        example = partial(self._example, pl_module, path, network)
        try:
            with trainer.precision_plugin.forward_context():
                division, traced = self._divided(network, example)
                images = example(REHEARSED)
                reason = None if images is None else rehearse(division, pl_module, rehearsed(images))
        except ConfigurationError as error:
            raise ConfigurationError(f"{type(self).__name__}: {error}") from error
        if reason is not None:
            raise refusal(network, reason)
        self._forward = RecomputedForward(network, lambda: division, pl_module, traced=traced)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove()

    def _remove(self) -> None:
        if self._forward is not None:
            self._forward.remove()
            self._forward = None

    def panel_rows(self) -> list[tuple[str, str]]:
        """Return the row of the start panel about the activations."""
        if self._forward is None:
            return []
        text = f"computed again in the backward, in {self._forward.division.stages} segments"
        if (costs := self._costs) is not None:
            kept, all_of_them = (
                format_bytes(size / costs.microbatch_size)
                for size in (choose_segments(costs).peak_bytes, costs.kept_bytes)
            )
            text += f"; {kept} instead of {all_of_them} for each sample"
        return [("activations", text)]

    def _check(self, module: LightningModule, network: nn.Module) -> None:
        """Refuse a network that torch.compile has compiled, or whose forward is not that of its class."""
        name, kind = type(self).__name__, type(network).__name__
        if is_compiled_whole(module) or is_compiled(module) or is_compiled(network):
            raise ConfigurationError(
                f"{name}: {kind} is compiled as a whole, and cannot be cut into segments: leave out torch.compile and "
                f"compile_backend, or {name}"
            )
        if "forward" in vars(network):
            raise ConfigurationError(
                f"{name}: the forward of {kind} was replaced by an assignment, and only the forward of its class can "
                "be cut into segments: define the forward in a subclass"
            )

    def _example(self, module: LightningModule, path: str, network: nn.Module, size: int) -> Any:
        images = example_inputs(module, path, size)
        return None if images is None else on_device_of(network, images)

    def _divided(self, network: nn.Module, example: Any) -> tuple[Division, fx.GraphModule]:
        """Return the division of the network into segments, and the network's graph."""
        decide_by_shapes(network, example)
        cuts: Sequence[str | int] | None = self.cuts
        traced = trace_open(network, True)
        if cuts is None:
            if not cut_positions(traced):
                raise ConfigurationError(
                    f"{type(network).__name__} cannot be cut anywhere: name another part of the module with submodule"
                )
            if (images := example(MEASURED)) is None:
                raise ConfigurationError(
                    "the activations are measured to choose the cuts, and the size of the images is not known: name "
                    "the cuts, set self.example_input_array in the module, or image_shape (C, H, W) in the data module"
                )
            self._costs = _costs(traced, images)
            cuts = choose_segments(self._costs).cuts
        return Division(network, cuts, traced), traced


def _costs(traced: fx.GraphModule, images: Any) -> GraphCosts:
    """Return the bytes of a network's nodes, without computing if its code can run on the meta device."""
    if not seals(traced):  # The code of these modules would run, and may have effects.
        with contextlib.suppress(Exception):
            return bytes_of(traced, images, MEASURED)
    return profile(traced, images, repeats=1)
