"""Divide one network of each of timm's and torchvision's families into two stages, and measure the time.

    python benchmarks/pipeline/families.py [--only NAME ...] [--device cpu] [--again] [--profile]
    python benchmarks/pipeline/families.py --check [--only NAME ...]

The script needs timm, as in the environment of `make test-zoo`. Each network is built without values, on the meta
device, in a process of its own, and divided after about half of its parameters; with `--device cpu` it has values.
Results are kept in `build/families`, so a second call continues; `--again` forgets the results of the chosen networks.
When all families have a result, the script writes its page. With `--check` the stages of some networks run on the CPU,
one after the other, and must have the outputs and gradients of the whole network.
"""

import argparse
import copy
import cProfile
import json
import multiprocessing
import pstats
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any

import timm
import torch
from ranks import machine, report
from torch import Tensor, nn
from torchvision.models import get_model

sys.path.append(str(Path(__file__).resolve().parents[2]))

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.division import Division
from cnnstrategies.pipeline.node_uses import ordered_nodes, state_names
from cnnstrategies.pipeline.tracing import cut_positions, decide_by_shapes, trace_open
from tests.pipeline.stages_in_turn import train_in_stages
from tests.zoo.catalogue import TIMM, TORCHVISION, by_name

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build/families"
LIMIT = 600.0  # Seconds after which the division of a network is ended.
CLASSES = 5
# Families that the zoo leaves out, because their networks are too large to be trained in its tests.
LARGE = by_name(
    {
        96: "gemma4_vit_167m nasnetalarge pnasnet5large",
        126: "deepseek_vit_412m",
        192: "qwen3_vit_88m",
        224: "beit_base_patch16_224 naflexvit_base_patch16_gap samvit_base_patch16_224 visformer_tiny",
        256: "mobilenetv5_base",
    }
)
# For each network: the function that builds it, and the size of its images.
FAMILIES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    **{
        f"timm.{name}": (partial(timm.create_model, name, num_classes=CLASSES), size)
        for name, size in sorted((TIMM | LARGE).items())
    },
    **{
        f"torchvision.{name}": (partial(get_model, name, num_classes=CLASSES), size)
        for name, size in sorted(TORCHVISION.items())
    },
}
# Networks whose stages `--check` compares with the whole network. The values are the dtypes of autocast. The attention
# of efficientvit computes without autocast.
CHECKED: dict[str, tuple[torch.dtype | None, ...]] = {
    "timm.efficientvit_b0": (None, torch.bfloat16),
    "timm.efficientvit_b1": (torch.bfloat16,),
    "timm.eva02_tiny_patch14_224": (None,),
    "timm.test_byobnet": (None,),
    "timm.test_convnext": (None,),
    "timm.test_mambaout": (None,),
    "timm.test_resnet": (None,),
    "timm.test_vit": (None,),
    "timm.visformer_tiny": (None,),
    "torchvision.mobilenet_v3_small": (None,),
    "torchvision.shufflenet_v2_x0_5": (None,),
    "torchvision.squeezenet1_1": (None,),
}
TEXT = """
The smallest network of each of timm's {timm} families, without values, and {torchvision} networks of torchvision, each
divided into two stages after about half of its parameters. The time is the CPU time, with one thread, of everything a
pipeline does for it: the numbers that the network derives from the shape of its images, the trace that finds possible
cuts, and the division. {divided} of {count} are divided, with a median of {median:.1f} s and a maximum of
{longest:.1f} s.

Opened: modules whose code runs as a graph; all other modules run as they are. Share: parameters of the first stage. It
is far from a half where a module that cannot be cut has most of the parameters: the encoders of gemma4_vit and
qwen3_vit, the last level of nest and the last layers of timm's vgg11 branch on shapes, and modules that the blocks of
coat share must be in one stage.

`--check` runs the stages of {checked} networks one after the other. Outputs, gradients and buffers equal those of the
whole network: in float64 within 1e-14 of the largest value, and in the part of efficientvit that leaves autocast, under
bfloat16, exactly for the outputs; its gradients are sums of bfloat16 numbers, whose order is a different one if a cut
separates the users of a value.
"""


def built(name: str, device: str) -> nn.Module:
    """Return the network of a family, or another network of timm, on a device."""
    torch.manual_seed(0)
    make = FAMILIES[name][0] if name in FAMILIES else partial(timm.create_model, name.removeprefix("timm."))
    with torch.device(device):
        return make()


def images_for(name: str, count: int, device: str) -> Tensor:
    """Return images for the network of a family."""
    size = FAMILIES[name][1] if name in FAMILIES else 96
    return torch.randn(count, 3, size, size, device=device)


def middle(network: nn.Module) -> tuple[int, float]:
    """Return the possible cut that is nearest to half of the parameters, and the share of the first stage."""
    traced = trace_open(network, True)
    sizes = []
    for node in ordered_nodes(traced):
        tensors = {name: attrgetter(name)(traced) for name in state_names(traced, node)}
        sizes.append(sum(tensor.numel() for tensor in tensors.values()))
    total = max(sum(sizes), 1)
    share = {cut: sum(sizes[:cut]) / total for cut in cut_positions(traced)}
    cut = min(share, key=lambda cut: abs(share[cut] - 0.5))
    return cut, share[cut]


def divided(name: str, device: str) -> dict[str, Any]:
    """Divide the network of a family, and return what the page says of it."""
    try:
        network = built(name, device)
    except Exception:
        device = "cpu"
        network = built(name, device)
    row: dict[str, Any] = {"device": device, "modules": sum(1 for _ in network.modules())}
    start = time.process_time()
    try:
        decide_by_shapes(network, lambda count: images_for(name, count, device))
        row["numbers"] = time.process_time() - start
        cut, row["share"] = middle(network)
        division = Division(network, [cut])
        row |= {"result": "divided", "opened": len(division.opened)}
    except ConfigurationError as error:
        row["result"] = f"refused: {error}"
    return row | {"seconds": time.process_time() - start}


def in_process(name: str, device: str, sender: Connection, profiled: bool) -> None:
    """Send the result of a family. The function runs in a process of its own."""
    torch.set_num_threads(1)
    with cProfile.Profile() if profiled else nullcontext() as calls:
        row = divided(name, device)
    if calls is not None:
        pstats.Stats(calls).sort_stats("tottime").print_stats(25)
    sender.send(row)


def result_of(name: str, device: str, profiled: bool) -> dict[str, Any]:
    """Return the result of a family, from a process that is ended after `LIMIT` seconds."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=in_process, args=(name, device, sender, profiled))
    process.start()
    sender.close()
    try:
        if not receiver.poll(LIMIT):
            return {"result": f"not divided within {LIMIT:.0f} s", "seconds": LIMIT}
        row: dict[str, Any] = receiver.recv()
        return row
    except EOFError:
        return {"result": "ended with an error", "seconds": 0.0}
    finally:
        process.kill()
        process.join()


def check(name: str, dtype: torch.dtype | None) -> tuple[float, float, float]:
    """Compare the stages of a network with the whole network, and return the largest differences.

    A step of the network draws random numbers in the order of its stages, so both have equal draws. The differences
    are those of the outputs, of all gradients, and of each buffer.
    """
    network = built(name, "cpu").to(torch.float64 if dtype is None else torch.float32)
    whole = copy.deepcopy(network)
    images = images_for(name, 4, "cpu").to(next(network.parameters()).dtype)
    decide_by_shapes(network, lambda count: images[:count])
    division = Division(network, [middle(network)[0]])
    autocast = nullcontext if dtype is None else partial(torch.autocast, "cpu", dtype)
    with autocast():
        torch.manual_seed(1)
        expected = whole(images)
        expected.square().sum().backward()
        torch.manual_seed(1)
        result = train_in_stages(division, images)
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    trained = {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}
    assert gradients.keys() == trained.keys()
    buffers = [(value, other) for value, other in zip(network.buffers(), whole.buffers(), strict=True) if value.numel()]
    return (
        difference([(result, expected)]),
        difference([(trained[name], gradient) for name, gradient in gradients.items()]),
        max((difference([pair]) for pair in buffers), default=0.0),
    )


def difference(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the largest difference of two tensors of a pair, as a fraction of the largest value of all tensors."""
    largest = max(value.abs().max().item() for _, value in pairs)
    return max((value - other).abs().max().item() for value, other in pairs) / (largest or 1.0)


def write_page(rows: dict[str, dict[str, Any]]) -> None:
    """Write the page beside this script."""
    seconds = sorted(row["seconds"] for row in rows.values() if row["result"] == "divided")
    text = TEXT.format(
        timm=sum(name.startswith("timm.") for name in rows),
        torchvision=sum(name.startswith("torchvision.") for name in rows),
        divided=len(seconds),
        count=len(rows),
        median=seconds[len(seconds) // 2],
        longest=seconds[-1],
        checked=len(CHECKED),
    )
    table = [("network", "seconds", "modules", "opened", "share", "result")]
    for name, row in rows.items():
        share = f"{row['share']:.0%}" if "share" in row else ""
        numbers = (str(row.get("modules", "")), str(row.get("opened", "")), share)
        table.append((name, f"{row['seconds']:.1f}", *numbers, row["result"]))
    packages = ", ".join(f"{package} {version(package)}" for package in ("timm", "torchvision"))
    report(Path(__file__).with_suffix(".md"), "Dividing published networks", text, table, f"{packages}, one thread")


def missing() -> list[str]:
    """Return the families of the installed timm that have no network here."""
    modules = timm.list_modules()
    return [module for module in modules if not {*timm.list_models(module=module)} & {*TIMM, *LARGE}]


def main(names: Sequence[str], device: str, again: bool, profiled: bool) -> None:
    """Divide the networks that have no result yet, and write the page if all have one on the meta device."""
    (RESULTS / device).mkdir(parents=True, exist_ok=True)
    for name in names:
        file = RESULTS / device / f"{name}.json"
        if again or not file.exists():
            file.write_text(json.dumps(result_of(name, device, profiled)))
        row = json.loads(file.read_text())
        print(f"{name}: {row['seconds']:.1f} s, {row.get('opened', 0)} opened, {row['result']}", flush=True)
    files = {name: RESULTS / "meta" / f"{name}.json" for name in FAMILIES}
    if all(file.exists() for file in files.values()):
        write_page({name: json.loads(file.read_text()) for name, file in files.items()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of networks, or parts of names")
    parser.add_argument("--device", choices=("meta", "cpu"), default="meta", help="device of the networks")
    parser.add_argument("--again", action="store_true", help="forget the results of the chosen networks")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--check", action="store_true", help="compare stages with whole networks")
    arguments = parser.parse_args()
    if absent := missing():
        sys.exit(f"timm has families without a network in this script: {', '.join(absent)}")
    among = CHECKED if arguments.check else FAMILIES
    chosen = [name for name in among if any(part in name for part in arguments.only or [""])]
    if arguments.check:
        print(machine("one thread"))
        torch.set_num_threads(1)
        for name in chosen:
            for dtype in CHECKED[name]:
                outputs, gradients, buffers = check(name, dtype)
                kind = "float64" if dtype is None else f"{dtype}"
                print(f"{name}, {kind}: {outputs:.1e}, {gradients:.1e}, {buffers:.1e}", flush=True)
    else:
        main(chosen, arguments.device, arguments.again, arguments.profile)
