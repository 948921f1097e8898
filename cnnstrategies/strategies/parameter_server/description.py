"""A parameter server in words: its servers, and what it does in another way than one device."""

from collections.abc import Sequence

from torch import nn

from cnnstrategies.paramserver.slicing import cut
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.strategies.differences import differences_of_replicas
from cnnstrategies.strategies.parameter_server.options import AVERAGING, Options

MEGABYTE = 1e6


def describe_servers(options: Options, specification: Specification, nodes: int) -> list[tuple[str, str]]:
    """Mode, servers, and the part of the parameters that each of them holds."""
    load = [0] * specification.servers
    for part in cut(specification):
        for server in part.servers:
            load[server] += part.nbytes
    least, most = (f"{bytes / MEGABYTE:.3g}" for bytes in (min(load), max(load)))
    share = least if least == most else f"{least} to {most}"
    if options.endpoints:
        where = "dedicated"
    else:
        where = f"{options.servers} on each of {nodes} nodes" if nodes > 1 else "on this node"
    text = f"{specification.servers} ({where}), {share} MB of parameters each"
    if options.replication > 1:
        text += f"; each part is on {options.replication} of them"
    mode = options.mode + (f", staleness {options.staleness}" if options.mode == "ssp" else "")
    if options.combine:
        mode += ", one push for each node"
    return [("mode", mode), ("servers", text)]


def differences_of_servers(
    options: Options,
    module: nn.Module,
    workers: int,
    batch_size: int | None,
    accumulated: int,
    sees_gradients: Sequence[str] = (),
) -> list[str]:
    """What is different from one device, one line each.

    Args:
        options: What the user asks for.
        module: What is trained.
        workers: Workers of the run.
        batch_size: Samples of a worker's batch; None where they are not known.
        accumulated: Batches that a worker makes an update from.
        sees_gradients: The user's hooks that look at gradients.
    """
    lines = []
    if options.mode == "local" and workers > 1:
        lines.append("each worker makes its own steps")
        outer = f"outer_lr {options.outer_lr:g}, outer_momentum {options.outer_momentum:g}"
        if (options.outer_lr, options.outer_momentum) == AVERAGING:
            lines.append(f"weights are averaged every {options.sync_every} steps")
        else:
            lines.append(f"an outer step every {options.sync_every} steps, on the mean of what they changed ({outer})")
    elif not options.aggregates and workers > 1:
        images = "" if batch_size is None else f" on {batch_size * accumulated} images"
        lines.append(f"each update is one worker's gradient{images}")
        if options.mode == "ssp":
            lines.append(f"no worker is more than {options.staleness} steps ahead of the slowest")
        else:
            lines.append("of weights that may be any number of updates old")
    if options.data_dispatch == "dynamic":
        lines.append("faster workers take more of the batches")
    pushed = "differences" if options.mode == "local" else "gradients"
    share = f"{options.compression_ratio:.3g}"
    changes = ", or that change by one bit a value, the rest later" if options.aggregates else ""
    sent = {
        "none": None,
        "topk": f"{share} of all {pushed} is sent, the rest later",
        "onebit": f"{pushed} are sent as one bit a value, the rest later",
        "auto": f"{pushed} may be sent as bf16, or as one bit a value, the rest later",
    }
    used = {
        "none": None,
        "topk": f"forward and backward use weights of which {share} is renewed in a step",
        "onebit": "forward and backward use weights that a step changes by one bit a value, the rest later",
        "auto": f"forward and backward may use weights rounded to fp16{changes}",
    }
    lines += filter(None, [
        sent.get(options.compression, f"{pushed} are sent as {options.compression}"),
        used.get(options.pull_compression, f"forward and backward use weights rounded to {options.pull_compression}"),
    ])  # fmt: skip
    if sees_gradients and options.mode != "local":
        lines.append(f"gradients leave after {', '.join(sees_gradients)}")
        if workers > 1:
            lines[-1] += ", which finds those of each worker's own images, not their mean"
    return lines + differences_of_replicas(module, workers, batch_size, "the workers' mean")
