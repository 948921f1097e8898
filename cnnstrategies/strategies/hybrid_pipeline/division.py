"""Divide a network for a run: the same weights on all ranks, the layout, and the engine."""

from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from cnnstrategies.models.own_forward import network_at
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.transport import cpu_group
from cnnstrategies.strategies.hybrid_pipeline.comparison import COMPARED, compare_on_rank_zero
from cnnstrategies.strategies.hybrid_pipeline.example import example_images
from cnnstrategies.strategies.hybrid_pipeline.layout import ChosenLayout, LayoutRequest


def broadcast_weights(network: nn.Module, timeout: timedelta) -> None:
    """Start from rank 0's weights on every rank; a collective.

    Args:
        network: The whole network.
        timeout: How long to wait for another rank.
    """
    if dist.get_world_size() == 1:
        return
    with torch.no_grad(), cpu_group(timeout) as group:
        for tensor in (*network.parameters(), *network.buffers()):
            whole = tensor.detach().cpu().contiguous()
            dist.broadcast(whole, 0, group=group)
            tensor.copy_(whole)


def choose_layout(
    request: LayoutRequest, trainer: Trainer, path: str, device: torch.device, whole: bool
) -> ChosenLayout:
    """A layout, whose stages compute what the whole network computes where that will be trained; a collective.

    Args:
        request: What the user asks for.
        trainer: The trainer.
        path: The path of the network.
        device: That of this rank.
        whole: Whether each rank has the whole network, without which nothing is compared.

    Raises:
        ConfigurationError: There is none, or they compute something else.
    """
    network = network_at(trainer.lightning_module, path)
    example = partial(example_images, trainer.lightning_module, path)
    layout = request.choose(network, trainer, trainer.world_size, device, example)
    if trainer.state.fn == TrainerFn.FITTING and layout.cuts and not whole:
        rank_zero_warn(
            f"{type(network).__name__} was not compared with its stages, as no rank has built the whole: compare a "
            "small one of its kind, built in __init__"
        )
    elif trainer.state.fn == TrainerFn.FITTING and layout.cuts:
        images = example(COMPARED) if trainer.is_global_zero else None
        compare_on_rank_zero(network, layout.cuts, images, trainer, device)
    if device.type == "cuda":
        # What the training holds is to be measured, and not what these trials have held.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return layout


def build_pipeline(
    network: nn.Module,
    layout: ChosenLayout,
    request: LayoutRequest,
    device: torch.device,
    timeout: timedelta,
    compile_backend: str | None,
) -> Pipeline:
    """The engine; a collective.

    Args:
        network: The whole network.
        layout: How it is divided.
        request: What the user asks for besides.
        device: That of this rank.
        timeout: How long to wait for another rank.
        compile_backend: With which to compile the stages, if at all.
    """
    return Pipeline(
        network,
        layout.cuts,
        layout.replicas,
        layout.microbatches,
        request.schedule,
        layout.run_ahead,
        request.batch_norm,
        request.activation_checkpointing,
        device,
        timeout,
        placement=request.placement,
        compile_backend=compile_backend,
    )
