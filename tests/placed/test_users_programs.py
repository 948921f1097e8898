"""Programs as users write them, with parameters at places: all ranks get what one device gets."""

import copy
import inspect
import io
import itertools
import json
import math
import pickle
import random
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cnnstrategies.placed import DivergedError, Places
from tests.placed.placements import check
from tests.placed.turns import on_ranks, outcomes

FIRST, SECOND, PAIR = (0,), (1,), (1, 2)
PLACES = [(FIRST, SECOND, None), (PAIR, FIRST, SECOND)]


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((3, 4), (3, 4), (4,))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def loss_of(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a @ b.T).logsumexp(0).mean() + (b * c).square().mean() + a.square().mean()


def sorted_by_norm(*parameters: Tensor) -> Any:
    order = sorted(range(3), key=lambda index: parameters[index].norm().item())
    by_tensor = sorted(parameters, key=lambda parameter: parameter.norm(), reverse=True)
    largest = max(parameters, key=lambda parameter: float(parameter.abs().max()))
    return [order, [id(p) for p in by_tensor] == [id(parameters[i]) for i in reversed(order)], largest.norm()]


def keyed_by_parameter(*parameters: Tensor) -> Any:
    names = dict(zip(parameters, "abc", strict=True))
    seen = {parameters[1]} | {parameters[0], parameters[0]}
    groups = defaultdict(list)
    for parameter in parameters:
        groups[parameter.dim()].append(names[parameter])
    return [
        [names[p] for p in reversed(parameters)],
        len(seen),
        parameters[1] in seen,
        parameters[2] in names,
        parameters[0] in list(parameters),
        list(parameters).index(parameters[0]),
        hash(parameters[0]) == hash(parameters[0]),
        dict(groups),
    ]


def equality(a: Tensor, b: Tensor, c: Tensor) -> Any:
    kept = [a.detach().clone(), b.detach().clone()]
    return [
        any(torch.equal(a, other) for other in kept),
        any(torch.equal(b, other) for other in reversed(kept)),
        torch.equal(a, b),
        torch.allclose(c, c + 1e-12),
        any(a is other for other in (b, a)),
        bool((a == kept[0]).all()),
    ]


def texts(a: Tensor, b: Tensor, c: Tensor) -> Any:
    loss = loss_of(a, b, c).detach()
    return [
        f"{loss}",
        f"{loss:.4f} {a.max():8.3f}",
        f"loss {loss.item():.3e}",
        format(b.sum(), ".3f"),
        f"{c.mean():.2f}",
        json.dumps({"loss": loss.item(), "weights": c.tolist()}),
        str(round(loss.item(), 3)),
        str(a.shape),
    ]


def saved(a: Tensor, b: Tensor, c: Tensor) -> Any:
    layer = nn.Linear(4, 3, dtype=torch.float64)
    layer.weight, layer.bias = nn.Parameter(a.detach()), nn.Parameter(b.detach()[:, 0].clone())
    layer.register_buffer("mean", c.detach())
    file = io.BytesIO()
    torch.save({"state": layer.state_dict(), "loss": loss_of(a, b, c).detach(), "epoch": 3}, file)
    file.seek(0)
    loaded = torch.load(file)
    again = pickle.loads(pickle.dumps([layer, a.detach()]))
    assert isinstance(again[0].weight, nn.Parameter)
    return [loaded, dict(again[0].state_dict()), again[1], len(file.getvalue()) > 500]


def copied(a: Tensor, b: Tensor, c: Tensor) -> Any:
    shallow, deep = copy.copy(a.detach()), copy.deepcopy(b.detach())
    deep.mul_(2)
    kept = copy.deepcopy({"best": [a.detach(), c.detach()]})
    return [shallow, deep, b, kept]


def best_weights(a: Tensor, b: Tensor, c: Tensor) -> Any:
    best, kept, bad = math.inf, {}, 0
    parameters = {"a": a, "b": b, "c": c}
    for step in range(6):
        loss = loss_of(a, b, c)
        if loss < best:
            best, kept, bad = loss.item(), {name: p.detach().clone() for name, p in parameters.items()}, 0
        else:
            bad += 1
        if bad == 2:
            break
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        with torch.no_grad():
            for parameter, gradient in zip(parameters.values(), gradients, strict=True):
                parameter.sub_(gradient, alpha=0.5 if step < 2 else -3.0)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(kept[name])
    return [best, bad, a, b, c]


def pruned(*parameters: Tensor) -> Any:
    threshold = torch.cat([p.detach().abs().flatten() for p in parameters]).kthvalue(9).values
    kept = []
    with torch.no_grad():
        for parameter in parameters:
            mask = parameter.abs() > threshold
            parameter.mul_(mask)
            kept.append(int(mask.sum()))
    return [kept, sum(kept) / sum(p.numel() for p in parameters), *parameters]


def initialised_by_row(a: Tensor, b: Tensor, c: Tensor) -> Any:
    drawn = 0
    with torch.no_grad():
        for row in itertools.chain(a, b):
            if row.norm() < 2:
                row.normal_(0, 0.1)
                drawn += 1
    return [drawn, a, b, torch.rand(2)]


def global_norms(*parameters: Tensor) -> Any:
    loss_of(*parameters).backward()
    norms = [p.grad.norm() for p in parameters]
    total = torch.sqrt(sum(norm**2 for norm in norms))
    with torch.no_grad():
        for parameter in parameters:
            parameter.grad.mul_(min(1.0, 0.1 / (total + 1e-6)))
    ratio = {i: (p.grad.norm() / p.norm()).item() for i, p in enumerate(parameters)}
    return [total, ratio, [p.grad for p in parameters], all(p.grad.isfinite().all() for p in parameters)]


def projected_gradients(a: Tensor, b: Tensor, c: Tensor) -> Any:
    first = torch.autograd.grad(loss_of(a, b, c), [a, b], retain_graph=True)
    second = torch.autograd.grad((a * b).sum(), [a, b])
    x, y = (torch.cat([gradient.flatten() for gradient in gradients]) for gradients in (first, second))
    if (dot := x @ y) < 0:
        x = x - dot / y.square().sum() * y
    return [dot, x, torch.stack([x, y]) @ torch.stack([x, y]).T]


def decided_by_chance(a: Tensor, b: Tensor, c: Tensor) -> Any:
    generator, chosen = np.random.default_rng(3), []
    random.seed(4)
    for _ in range(3):
        chosen.append(int(generator.choice(4, p=c.detach().softmax(0).numpy())))
        if random.random() < torch.sigmoid(a.mean()):
            chosen.append(-1)
    index = torch.multinomial(b.detach().softmax(1), 1)
    return [chosen, Counter(index.flatten().tolist()), b.gather(1, index)]


def with_numpy(a: Tensor, b: Tensor, c: Tensor) -> Any:
    counts, edges = np.histogram(a.detach().numpy(), bins=3)
    table = np.stack([p.detach().cpu().numpy() for p in (a, b)])
    return [
        counts.tolist(),
        edges.tolist(),
        float(np.percentile(table, 90)),
        torch.from_numpy(table),
        np.array(c.tolist())[1],
    ]


def checks_of_values(a: Tensor, b: Tensor, c: Tensor) -> Any:
    loss = loss_of(a, b, c)
    assert torch.isfinite(loss)
    assert math.isfinite(loss)
    if torch.isnan(loss) or any(p.isnan().any() for p in (a, b, c)):
        raise ValueError
    hard = torch.where(a[0] > 0)[0]
    return [int(loss), loss.detach().numpy().item(), [i for i, x in enumerate(c) if x > 0], hard, b[0, hard]]


def decomposed(a: Tensor, b: Tensor, c: Tensor) -> Any:
    u, s, v = torch.linalg.svd(a.detach(), full_matrices=False)
    rank = int((s > 0.1 * s[0]).sum())
    return [
        rank,
        (u[:, :rank] * s[:rank]) @ v[:rank],
        torch.linalg.matrix_norm(b),
        torch.linalg.eigvalsh(b @ b.T),
        s[0] / s[-1],
    ]


def running_means(a: Tensor, b: Tensor, c: Tensor) -> Any:
    means: dict[Any, Any] = {}
    for _ in range(3):
        for name, value in {"a": a.mean(), "b": b.abs().max(), "all": loss_of(a, b, c)}.items():
            means[name] = value.detach() if name not in means else 0.9 * means[name] + 0.1 * value.detach()
        with torch.no_grad():
            a.mul_(0.9)
    return [means, {name: float(value) for name, value in means.items()}, torch.tensor(list(means.values()))]


PROGRAMS = [
    sorted_by_norm,
    keyed_by_parameter,
    equality,
    texts,
    saved,
    copied,
    best_weights,
    pruned,
    initialised_by_row,
    global_norms,
    projected_gradients,
    decided_by_chance,
    with_numpy,
    checks_of_values,
    decomposed,
    running_means,
]


@pytest.mark.light
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_users_program_gives_on_all_ranks_what_it_gives_on_one_device(program: Any) -> None:
    for at in PLACES:
        check(program, operands(), at)


def saved_alone(loss: Tensor, layer: nn.Module) -> None:
    torch.save(layer.state_dict(), io.BytesIO())


def formatted_alone(loss: Tensor, layer: nn.Module) -> None:
    assert f"{loss:.3f}"


def compared_alone(loss: Tensor, layer: nn.Module) -> None:
    assert torch.equal(layer.weight, torch.zeros(2, 2))


def sorted_alone(loss: Tensor, layer: nn.Module) -> None:
    sorted(layer.parameters(), key=lambda parameter: parameter.norm().item())


def listed_alone(loss: Tensor, layer: nn.Module) -> None:
    assert loss.tolist()


def branched_alone(loss: Tensor, layer: nn.Module) -> None:
    assert loss.isfinite() or loss > 1


@pytest.mark.light
@pytest.mark.parametrize(
    "read", [saved_alone, formatted_alone, compared_alone, sorted_alone, listed_alone, branched_alone]
)
def test_a_read_on_one_rank_only_ends_with_a_line_that_names_both_places(read: Any) -> None:
    def program(places: Places) -> None:
        layer = nn.Linear(2, 2)
        for name, parameter in layer.named_parameters():
            places.set_place(parameter, (1,), name)
        loss = layer(torch.ones(1, 2)).sum().detach()
        if places.rank == 0:
            read(loss, layer)
        loss.item()

    _, errors = outcomes(2, program)
    (error,) = (error for error in errors if error is not None)
    assert isinstance(error, DivergedError)
    lines = {line_of(read, read.__code__.co_firstlineno + 1), line_of(read, inspect.getsourcelines(program)[1] + 7)}
    assert all(line in str(error) for line in lines), error
    assert "\n" not in str(error)


def line_of(function: Any, number: int) -> str:
    return f"{inspect.getsourcefile(function).rsplit('/', 1)[-1]}:{number}"  # type: ignore[union-attr]


@pytest.mark.light
def test_code_on_one_rank_that_reads_no_values_of_other_ranks_works() -> None:
    def program(places: Places) -> list[Any]:
        layer = nn.Linear(2, 2)
        for name, parameter in layer.named_parameters():
            places.set_place(parameter, (1,), name)
        loss = layer(torch.ones(1, 2)).sum()
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        seen: list[Any] = []
        if places.rank == 0:
            print(loss, layer.weight, [loss], layer)
            seen = [repr(loss), f"{layer.weight}", str(optimizer), hash(loss), {loss: 1}[loss], loss in [loss]]
            copies = copy.deepcopy([layer, optimizer]), copy.copy(layer.weight), layer.weight.clone()
            seen += [copies, sum(parameter.numel() for parameter in layer.parameters()), list(layer.state_dict())]
            seen += [loss.shape, loss.requires_grad, layer.weight.T.shape, loss * 2, layer.weight.detach().cpu()]
        return [loss.item(), bool(seen)]

    first, second = on_ranks(2, program)
    assert first[0] == second[0]
    assert [first[1], second[1]] == [True, False]
