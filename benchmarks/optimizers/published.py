"""Published optimizers under each strategy: equal to one device, refused by name, different, or a crash.

    python benchmarks/optimizers/published.py [--only NAME ...] [--output benchmarks/optimizers/published.md]

The script needs the extra `optimizers`. It takes every optimizer of torch, timm, pytorch_optimizer, schedulefree,
prodigyopt, dadaptation and lion_pytorch that trains a small network on one device with its default arguments. Each
optimizer makes `STEPS` steps in float64:

- on one device;
- under `ddp`: two processes, which train all optimizers one after the other, each with torch's own DDP;
- under `hybrid_pipeline`: two processes with the parameters of one stage each, which train all optimizers one after the
  other by the rules for placed tensors;
- under `parameter_server` with `mode: sync`: first the strategy's own check, which refuses optimizers; then, in this
  process, a worker and two servers' stores, which receive the worker's hyperparameters and gradients.
"""

import argparse
import importlib
import importlib.util
import inspect
import json
import multiprocessing
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.server.store import Store
from cnnstrategies.paramserver.slicing import Slice, cut
from cnnstrategies.paramserver.specification import Specification, hyperparameters
from cnnstrategies.placed import GlooLink, Places
from cnnstrategies.placed.hidden import hide_foreign_gradients
from cnnstrategies.placed.messages import RefusedError
from cnnstrategies.strategies import ParameterServerStrategy
from cnnstrategies.strategies.parameter_server import checks

PACKAGES = ("torch", "timm", "pytorch_optimizer", "schedulefree", "prodigyopt", "dadaptation", "lion_pytorch")
MODULES = ("torch.optim", "timm.optim", *PACKAGES[2:])
STRATEGIES = ("ddp", "hybrid_pipeline", "parameter_server")
STEPS, BATCH, SERVERS = 5, 8, 2
TOLERANCE = 1e-6  # Largest difference from one device, as a fraction of the largest change of a weight.
PATIENCE = 10.0  # Longest wait of a rank for another rank in seconds.
Make = Callable[[list[nn.Parameter]], Any]


def catalogue() -> Iterator[tuple[str, Make]]:
    """Yield the name of each optimizer of the installed packages, and a function that makes it for some parameters."""
    for module in MODULES:
        if importlib.util.find_spec(module) is None:
            continue
        package = importlib.import_module(module)
        for name, kind in sorted(vars(package).items()):
            if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer:
                yield f"{module}.{name}", lambda parameters, kind=kind: made(kind, parameters)


def made(kind: Any, parameters: list[nn.Parameter]) -> Any:
    """Make an optimizer with its default arguments, or around SGD if it wraps another optimizer."""
    accepted = inspect.signature(kind).parameters
    required = {name for name, value in accepted.items() if value.default is value.empty and value.kind < 2}
    arguments: dict[str, Any] = {}
    if "lr" in accepted and not isinstance(accepted["lr"].default, float):
        arguments["lr"] = 1e-2
    if "num_iterations" in required:
        arguments["num_iterations"] = 100
    if "num_data" in required:
        arguments["num_data"] = 64
    if "base_optimizer" in required and "params" in required:
        return kind(parameters, base_optimizer=torch.optim.SGD, lr=1e-2)
    if "optimizer" in required or "base_optimizer" in required:
        return kind(torch.optim.SGD(parameters, 1e-2), **arguments)
    if kind.__module__.startswith("pytorch_optimizer") and "use_muon" in inspect.getsource(kind):
        groups = [[p for p in parameters if (p.ndim > 1) == is_matrix] for is_matrix in (True, False)]
        pairs = zip(groups, (True, False), strict=True)
        parameters = [{"params": members, "use_muon": muon} for members, muon in pairs if members]  # type: ignore[misc]
    return kind(parameters, **arguments)


def network() -> nn.Sequential:
    """Return a small convolutional network, always with the same weights."""
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.Tanh()]
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 5))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the images and classes of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 3, 8, 8, generator=generator), torch.randint(5, (BATCH,), generator=generator)


def gradients(net: nn.Module, step: int) -> list[Tensor]:
    """Return the gradient of each parameter, as the mean of the gradients of the batch's halves."""
    images, classes = batch(step)
    halves = zip(images.chunk(2), classes.chunk(2), strict=True)
    parts = [torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters())) for x, y in halves]
    return [(first + second) / 2 for first, second in zip(*parts, strict=True)]


def trained(net: nn.Module, optimizer: Any) -> list[Tensor]:
    """Train a network, or one wrapped by DDP, and return its weights."""
    getattr(optimizer, "train", lambda: None)()
    rank, world = (dist.get_rank(), 2) if isinstance(net, DistributedDataParallel) else (0, 1)
    torch.manual_seed(2)
    for step in range(STEPS):
        images, classes = (tensor.chunk(world)[rank] for tensor in batch(step))

        def closure(images: Tensor = images, classes: Tensor = classes) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images), classes)
            loss.backward()
            return loss

        optimizer.step(closure)
    return weights(net)


def is_stable(make: Make, expected: list[Tensor]) -> bool:
    """Return whether one device trains the same weights if it adds the samples' gradients in another order."""
    net = network()
    parameters = list(net.parameters())
    optimizer = make(parameters)
    getattr(optimizer, "train", lambda: None)()
    torch.manual_seed(2)
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            for parameter, value in zip(parameters, gradients(net, step), strict=True):
                parameter.grad = value
            return torch.ones(())

        optimizer.step(closure)
    return compared(weights(net), expected) == "equal"


def weights(net: nn.Module) -> list[Tensor]:
    """Return copies of all weights of a network."""
    return [parameter.detach().clone() for parameter in net.parameters()]


def on_stage(make: Make, places: Places) -> list[Tensor]:
    """Return the weights after steps of a network whose parameters are divided among two ranks.

    Args:
        make: Function that makes the optimizer.
        places: The rules of this rank.
    """
    net = network()
    for index, layer in enumerate(net):
        place = (0,) if index < 2 else (1,)
        for name, parameter in layer.named_parameters():
            put = places.mark if places.rank in place else places.put_away
            put(parameter, place, f"{index}.{name}")
    optimizer = make(list(net.parameters()))
    hidden = hide_foreign_gradients(places, optimizer)
    trained(net, optimizer)
    hidden.remove()
    values = [parameter.tolist() for parameter in weights(net)]
    with places.local():
        return [torch.tensor(value) for value in values]


def under_servers(make: Make) -> list[Tensor]:
    """Return the weights after steps of two servers' stores, with the hyperparameters and gradients of a worker."""
    net = network()
    parameters = list(net.parameters())
    optimizer = make(parameters)
    (served,) = checks.check_optimizers([optimizer], ParameterServerStrategy().options)
    served.add_counters(optimizer)
    settings = {"servers": SERVERS, "slice_bytes": 256, "is_joint": served.is_joint}
    specification = Specification.of(net.named_parameters(), optimizer, 1, **settings)
    slices = cut(specification)
    stores = [Store(specification, [s for s in slices if s.servers[0] == server]) for server in range(SERVERS)]
    for slice_ in slices:
        stores[slice_.servers[0]].put(slice_.key, flat(slice_, weights(net)), 0)
    for step in range(STEPS):
        sent = [
            {name: values[name] for name in group.options}
            for group, values in zip(specification.groups, hyperparameters(optimizer), strict=True)
        ]
        sent = json.loads(json.dumps(sent))
        computed = gradients(net, step)
        for server, store in enumerate(stores):
            updates = {s.key: (flat(s, computed), 0) for s in slices if s.servers[0] == server}
            store.apply_all(updates, sent)
        optimizer.zero_grad()
        optimizer.step(lambda: torch.ones(()))
        for slice_ in slices:
            values = stores[slice_.servers[0]].values[slice_.key]
            for part, value in zip(slice_.parts, slice_.views(values), strict=True):
                parameters[part.parameter].detach().view(-1)[part.start : part.stop] = value.reshape(-1)
    return weights(net)


def flat(slice_: Slice, tensors: list[Tensor]) -> Tensor:
    """Return the elements of a slice, from tensors in the order of the parameters."""
    return torch.cat([tensors[part.parameter].reshape(-1)[part.start : part.stop] for part in slice_.parts])


def verdict(run: Callable[[], list[Tensor]], expected: list[Tensor]) -> str:
    """Return `equal`, or another verdict with its reason after a colon."""
    try:
        values = run()
    except ConfigurationError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"crashes: {type(error).__name__}: {error}".splitlines()[0]
    return compared(values, expected)


def compared(values: list[Tensor], expected: list[Tensor]) -> str:
    """Compare weights with those of one device, and return the verdict."""
    changes = zip(expected, weights(network()), strict=True)
    largest = max((value - first).abs().max().item() for value, first in changes)
    pairs = zip(values, expected, strict=True)
    difference = max((value - wanted).abs().max().item() for value, wanted in pairs) / largest
    return "equal" if difference <= TOLERANCE else f"differs: by {difference:.1e} of the largest change"


def alone(make: Make) -> list[Tensor] | None:
    """Return the weights of one device.

    Return None if the optimizer does not train the network with this closure, or if rounding errors decide the result.
    """
    try:
        net = network()
        optimizer = make(list(net.parameters()))
        assert optimizer.param_groups  # Lightning reads the groups.
        values = trained(net, optimizer)
    except Exception as error:
        print(f"    one device: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return None
    moved = any(not torch.equal(*pair) for pair in zip(values, weights(network()), strict=True))
    finite = moved and all(value.isfinite().all() for value in values)
    return values if finite and is_stable(make, values) else None


def rank_main(rank: int, folder: str, strategy: str, names: list[str]) -> None:
    """Train all optimizers under a strategy, and write this rank's weights or an error for each."""
    prepare()
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    results: dict[str, Any] = {}
    for name, make in catalogue():
        if name not in names:
            continue
        try:
            if strategy == "ddp":
                net = DistributedDataParallel(network())
                results[name] = trained(net, make(list(net.module.parameters())))
            else:
                # Messages of an optimizer that has failed must not reach the next optimizer.
                group = dist.new_group([0, 1], timedelta(seconds=PATIENCE))
                with Places(rank, 2, GlooLink(group, rank, 2)) as places:
                    results[name] = on_stage(make, places)
        except (ConfigurationError, RefusedError) as error:
            results[name] = f"refused: {error}"
        except Exception as error:
            results[name] = f"crashes: {type(error).__name__}: {error}".splitlines()[0]
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()


def on_ranks(strategy: str, names: list[str]) -> dict[str, Any]:
    """Return the weights, or the text of an error, for each optimizer under a strategy with two processes."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=rank_main, args=(rank, folder, strategy, names)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        results, others = (torch.load(f"{folder}/{rank}.pt") for rank in range(2))
    # If one rank refuses an optimizer, the other rank waits in vain.
    refusals = {name: text for name, text in others.items() if str(text).startswith("refused")}
    return {**results, **refusals}


def prepare() -> None:
    """Set the dtype and the number of threads, and turn off warnings and compilation."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.compiler.set_stance("force_eager")


def measure(only: list[str]) -> dict[str, dict[str, str]]:
    """Return the verdict of each optimizer under each strategy, by name. An empty `only` means all optimizers."""
    expected: dict[str, list[Tensor]] = {}
    results: dict[str, dict[str, str]] = {}
    for name, make in catalogue():
        if only and name not in only:
            continue
        values = alone(make)
        if values is None:
            print(f"{name} is left out", file=sys.stderr)
            continue
        expected[name] = values
        results[name] = {
            "ddp": "",
            "hybrid_pipeline": "",
            "parameter_server": verdict(lambda make=make: under_servers(make), values),
        }
        print(name, *(f"{key} {text[:150]}" for key, text in results[name].items() if text), sep="; ", file=sys.stderr)
    for strategy in ("ddp", "hybrid_pipeline"):
        for name, values in on_ranks(strategy, list(expected)).items():
            results[name][strategy] = values if isinstance(values, str) else compared(values, expected[name])
    return results


HEAD = """# Published optimizers

{count} optimizers of {packages}, each with its default arguments, for {steps} steps in float64: **equal** to one
device, or **refused** with the line that a user reads. `differs` and `crashes` must be 0.
[The script](published.py) trains under torch's DDP (`ddp` and `ddp_balanced` use it), on two ranks with the parameters
of one stage each, and with two synchronous servers in one process, after the strategy's own check.

"""


TAIL = """
Left out, because they do not train this network with a closure, or because rounding errors decide their steps on one
device: {left_out}.
"""


def page(results: dict[str, dict[str, str]]) -> str:
    """Return the page with the verdicts."""
    kinds = ("equal", "refused", "differs", "crashes")
    installed = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    text = HEAD.format(count=len(results), packages=installed, steps=STEPS)
    text += "| strategy | " + " | ".join(kinds) + " |\n| --- |" + " --- |" * len(kinds) + "\n"
    for strategy in STRATEGIES:
        counted = Counter(verdicts[strategy].split(":")[0] for verdicts in results.values())
        text += f"| {strategy} | " + " | ".join(str(counted[kind]) for kind in kinds) + " |\n"
    text += "\n| optimizer | " + " | ".join(STRATEGIES) + " |\n| --- |" + " --- |" * len(STRATEGIES) + "\n"
    notes: dict[str, int] = {}
    for name, verdicts in results.items():
        cells = []
        for strategy in STRATEGIES:
            kind, _, reason = verdicts[strategy].partition(": ")
            # The reasons are the same for many optimizers, except for the optimizer's name.
            reason = reason.replace(name.rpartition(".")[2], "OPTIMIZER", 1).splitlines()[0] if reason else ""
            note = notes.setdefault(reason, len(notes) + 1) if reason else 0
            cells.append(f"{kind} ({note})" if note else kind)
        text += f"| {name} | " + " | ".join(cells) + " |\n"
    text += "\n" + "".join(f"{number}. {reason}\n" for reason, number in notes.items())
    left_out = ", ".join(name for name, _ in catalogue() if name not in results)
    return text + TAIL.format(left_out=left_out)


def main() -> None:
    """Try the optimizers, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".md"))
    arguments = parser.parse_args()
    prepare()
    results = measure(arguments.only)
    arguments.output.write_text(page(results))
    print(arguments.output.read_text()[:1500])


if __name__ == "__main__":
    main()
