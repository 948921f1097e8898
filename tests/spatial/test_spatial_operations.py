"""Each rule gives the results and the gradients of one process, for random sizes and numbers of ranks.

The sizes include images with too few rows for all ranks, which every rank has whole.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.spatial.equality import check

Draw = random.Random
REPETITIONS, MANY_REPETITIONS = 2, 40
ATTEMPTS = 20  # Most numbers of rows are large enough.


def images(draw: Draw, dimensions: int = 2, smallest: int = 1, channels: int = 4) -> Tensor:
    others = range(max(smallest, 2), max(smallest, 6) + 1)
    sizes = [draw.randint(smallest, 20), *(draw.choice(others) for _ in range(dimensions - 1))]
    return torch.randn(draw.randint(1, 2), channels, *sizes, dtype=torch.float64)


def other(tensor: Tensor) -> Tensor:
    return torch.randn(tensor.shape, dtype=torch.float64)


def conv(draw: Draw, is_transposed: bool, dimensions: int) -> tuple[Callable[..., Any], list[Tensor]]:
    groups = draw.choice([1, 2])
    stride, dilation = draw.randint(1, 3), draw.randint(1, 2)
    kernel = draw.randint(1, 5 if dimensions == 2 else 3)
    padding = draw.randint(0, 3)
    if is_transposed:
        padding = min(padding, dilation * (kernel - 1) // 2)
    smallest = max(1, dilation * (kernel - 1) + 1 - 2 * padding)
    x = images(draw, dimensions, smallest if not is_transposed else 1)
    weight = torch.randn(4, 4 // groups, *[kernel] * dimensions, dtype=torch.float64)
    bias = torch.randn(4, dtype=torch.float64)
    if not is_transposed:
        return lambda x, w, b: getattr(F, f"conv{dimensions}d")(x, w, b, stride, padding, dilation, groups), [
            x,
            weight,
            bias,
        ]
    extra = draw.randint(0, max(stride, dilation) - 1)
    function = getattr(F, f"conv_transpose{dimensions}d")
    return lambda x, w, b: function(x, w, b, stride, padding, extra, groups, dilation), [x, weight, bias]


def pool(draw: Draw, kind: str, dimensions: int) -> tuple[Callable[..., Any], list[Tensor]]:
    kernel, stride, is_ceil = draw.randint(1, 4), draw.randint(1, 3), draw.choice([False, True])
    padding = draw.randint(0, kernel // 2)
    x = images(draw, dimensions, kernel)
    if kind == "max":
        return lambda x: getattr(F, f"max_pool{dimensions}d")(
            x, kernel, stride, padding, ceil_mode=is_ceil, return_indices=True
        ), [x]
    counts = draw.choice([False, True])
    divisor = draw.choice([None, 3]) if dimensions > 1 else None
    options = {"divisor_override": divisor} if divisor else {}
    function = getattr(F, f"avg_pool{dimensions}d")
    return lambda x: function(x, kernel, stride, padding, is_ceil, counts, **options), [x]


def norm(draw: Draw, is_training: bool) -> tuple[Callable[..., Any], list[Tensor]]:
    x = images(draw, draw.choice([2, 3]), 2)
    running = [torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)]

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        mean, variance = (tensor.clone() for tensor in running)
        return F.batch_norm(x, mean, variance, weight, bias, is_training, 0.3), mean, variance

    return function, [x, torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)]


def resize(draw: Draw, mode: str, dimensions: int) -> tuple[Callable[..., Any], list[Tensor]]:
    x = images(draw, dimensions)
    options: dict[str, Any] = {"mode": mode}
    if mode != "nearest" and mode != "nearest-exact":
        options["align_corners"] = draw.choice([False, True])
    if draw.random() < 0.5:
        options["scale_factor"] = draw.choice([2, 1.5, 3])
    else:
        options["size"] = [draw.randint(1, 17) for _ in range(dimensions)]
    return lambda x: F.interpolate(x, **options), [x]


def adaptive(draw: Draw, dimensions: int) -> tuple[Callable[..., Any], list[Tensor]]:
    size = [draw.randint(1, 5) for _ in range(dimensions)]
    return lambda x: getattr(F, f"adaptive_avg_pool{dimensions}d")(x, size), [images(draw, dimensions)]


def unary(function: Callable[..., Any], smallest: int = 1) -> Callable[[Draw], Any]:
    return lambda draw: (function, [images(draw, smallest=smallest)])


def binary(function: Callable[..., Any]) -> Callable[[Draw], Any]:
    def make(draw: Draw) -> Any:
        x = images(draw)
        return function, [x, other(x)]

    return make


def map_loss(function: Callable[..., Any]) -> Callable[[Draw], Any]:
    def make(draw: Draw) -> Any:
        x = images(draw)
        targets = torch.randint(0, 4, (x.shape[0], *x.shape[2:]))
        targets[0, 0, 0] = 3
        targets[-1, -1, -1] = -100
        return function, [x, targets]

    return make


def pooled_slice(x: Tensor) -> list[Tensor]:
    """Return images that are pooled in windows, of which some ranks have all rows."""
    part = torch.cat([x, -x], 1).contiguous(memory_format=torch.channels_last)[:, 2:6]
    return [F.max_pool2d(part, 2), F.avg_pool2d(part, 2)]


WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)

CASES: dict[str, Callable[[Draw], Any]] = {
    "conv1d": lambda draw: conv(draw, False, 1),
    "conv2d": lambda draw: conv(draw, False, 2),
    "conv3d": lambda draw: conv(draw, False, 3),
    "conv_transpose1d": lambda draw: conv(draw, True, 1),
    "conv_transpose2d": lambda draw: conv(draw, True, 2),
    "conv_transpose3d": lambda draw: conv(draw, True, 3),
    "max_pool2d": lambda draw: pool(draw, "max", 2),
    "max_pool3d": lambda draw: pool(draw, "max", 3),
    "avg_pool2d": lambda draw: pool(draw, "avg", 2),
    "avg_pool3d": lambda draw: pool(draw, "avg", 3),
    "batch_norm": lambda draw: norm(draw, True),
    "batch_norm with running statistics": lambda draw: norm(draw, False),
    "group_norm": lambda draw: (
        lambda x, w, b: F.group_norm(x, 2, w, b),
        [images(draw, draw.choice([2, 3]), 2), *torch.randn(2, 4, dtype=torch.float64)],
    ),
    "instance_norm": unary(lambda x: F.instance_norm(x, weight=WEIGHTS), smallest=2),
    "layer_norm": lambda draw: (
        lambda x, w, b: F.layer_norm(x.permute(0, 2, 3, 1), (4,), w, b).permute(0, 3, 1, 2),
        [images(draw), *torch.randn(2, 4, dtype=torch.float64)],
    ),
    "linear": lambda draw: (
        lambda x, w, b: F.linear(x.permute(0, 2, 3, 1), w, b).permute(0, 3, 1, 2),
        [images(draw), torch.randn(3, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)],
    ),
    "products over rows": unary(lambda x: torch.einsum("bchw,bdhw->bcd", x, x * x), smallest=2),
    "nearest 2d": lambda draw: resize(draw, "nearest", 2),
    "nearest-exact 2d": lambda draw: resize(draw, "nearest-exact", 2),
    "bilinear": lambda draw: resize(draw, "bilinear", 2),
    "bicubic": lambda draw: resize(draw, "bicubic", 2),
    "trilinear": lambda draw: resize(draw, "trilinear", 3),
    "adaptive_avg_pool2d": lambda draw: adaptive(draw, 2),
    "adaptive_avg_pool3d": lambda draw: adaptive(draw, 3),
    "activations": unary(
        lambda x: F.gelu(F.silu(F.relu6(F.leaky_relu(x)))) + F.hardswish(x) + F.elu(x) + F.softplus(x)
    ),
    "prelu": unary(lambda x: F.prelu(x, torch.full((4,), 0.3, dtype=torch.float64))),
    "in place": unary(lambda x: (x * 2).add_(1).mul_(3).masked_fill_(x > 1, 2).clamp_(0.5)),
    "sum of products": binary(lambda x, y: x * y + x / (y.square() + 1) - torch.where(x > y, x, y)),
    "with channels": unary(lambda x: x * torch.arange(4.0).view(4, 1, 1).double() + torch.ones(1).double()),
    "with a plain image": unary(lambda x: x * torch.linspace(0, 1, x.numel()).double().view(x.shape)),
    "with a map": unary(lambda x: x * torch.linspace(0, 1, x[0, 0].numel()).double().view(x.shape[2:])),
    "with a mean": unary(lambda x: x - x.mean((2, 3), keepdim=True)),
    "reductions": unary(lambda x: [x.sum(), x.mean(), x.sum(1), x.mean((0, 2)), x.sum(-1, keepdim=True), x.mean(2)]),
    "extremes": unary(lambda x: [x.amax(1), x.amin(3, keepdim=True)], smallest=2),
    "extremes of rows": unary(lambda x: [x.amax((2, 3)), x.amin(2)], smallest=5),
    "variances": unary(
        lambda x: [x.var(), x.std((2, 3)), *torch.var_mean(x, (1, 2), correction=0), x.var(1)], smallest=2
    ),
    "softmax": unary(lambda x: [x.softmax(1), x.log_softmax(3)]),
    "permutations": unary(lambda x: x.permute(2, 0, 3, 1).transpose(0, 1).unsqueeze(1).squeeze(1).mul(2)),
    "pixel shuffle": unary(lambda x: F.pixel_shuffle(x, 2) * 2),
    "pixel unshuffle": unary(lambda x: F.pixel_unshuffle(F.pad(x, (0, -x.shape[3] % 2, 0, -x.shape[2] % 2)), 2) * 2),
    "flatten": unary(lambda x: x.flatten(2).mul(2).transpose(1, 2)),
    "flatten batch": unary(lambda x: x.permute(0, 2, 3, 1).reshape(-1, 4).mul(2).view(x.shape[0], *x.shape[2:], 4)),
    "channel shuffle": unary(lambda x: x.view(x.shape[0], 2, 2, *x.shape[2:]).transpose(1, 2).reshape(x.shape) * 2),
    "expand": unary(lambda x: x[:, :1].expand(-1, 3, -1, -1) * 2),
    "slices": unary(lambda x: [x[:, 1:3] * 2, x[..., ::2] * 3, x[:, 1] * 2, x[:, :, :, -1] * 2]),
    "slices of rows": unary(lambda x: [x[:, :, 1:] * 2, x[:, :, :-2] * 2, x[:, :, 2:5] * 3], smallest=3),
    "split and cat": unary(lambda x: torch.cat([*x.split(2, 1), x.unbind(1)[0].unsqueeze(1)], 1) * 2),
    "cat of rows": binary(lambda x, y: torch.cat([x, y[:, :, 1:], x], 2) * 2),
    "stack": binary(lambda x, y: torch.stack([x, y], 2) * 2),
    "pad": unary(
        lambda x: [F.pad(x, (1, 2, 3, 0), value=2.0) * 2, F.pad(x, (1, 0)) * 2, F.pad(x, (0, 0, -1, 2)) * 2], 2
    ),
    "reflection": unary(lambda x: F.pad(x, (0, 1, 2, 1), mode="reflect") * 2, smallest=3),
    "replication": unary(lambda x: F.pad(x, (1, 2, 3, 1), mode="replicate") * 2),
    "largest class": unary(
        lambda x: [x.argmax(1), *x.max(1), x.min(3, keepdim=True)[0], x.logsumexp(1), x.norm(dim=1)]
    ),
    "lists of channels": unary(
        lambda x: [x[:, torch.tensor([0, 2, 0])] * 2, x.index_select(3, torch.tensor([1, 1])) * 2, F.glu(x, 1)]
    ),
    "along classes": unary(lambda x: x.gather(1, x.detach().argmax(1, keepdim=True)) * 2),
    "flip and roll": unary(lambda x: [x.flip(2) * 2, x.flip(1, 3) * 2, x.roll(2, 2) * 2, x.roll((-1, 1), (2, 3)) * 2]),
    "cross_entropy": map_loss(lambda x, t: F.cross_entropy(x, t)),
    "cross_entropy with weights": map_loss(
        lambda x, t: F.cross_entropy(x, t, WEIGHTS, ignore_index=-100, reduction="sum")
    ),
    "cross_entropy of pixels": map_loss(lambda x, t: F.cross_entropy(x, t, WEIGHTS, reduction="none")),
    "cross_entropy with smoothing": map_loss(lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1)),
    "mse_loss": binary(lambda x, y: [F.mse_loss(x, y), F.mse_loss(x, y, reduction="sum") * 2]),
    "smooth losses": binary(
        lambda x, y: [F.smooth_l1_loss(x, y, reduction="none"), F.huber_loss(x, y), F.l1_loss(x, y)]
    ),
    "binary_cross_entropy": binary(
        lambda x, y: [
            F.binary_cross_entropy(x.sigmoid(), y.sigmoid().detach()),
            F.binary_cross_entropy_with_logits(x, y.sigmoid().detach(), pos_weight=WEIGHTS.view(4, 1, 1)),
        ]
    ),
    "dropout": unary(lambda x: [F.dropout(x, 0.4), F.dropout2d(x, 0.4), *torch.native_dropout(x, 0.3, True)]),
    "dropout of enlarged images": unary(
        lambda x: F.dropout(F.interpolate(x.contiguous(memory_format=torch.channels_last), scale_factor=2), 0.4), 2
    ),
    "dropout of few rows in channels_last": unary(
        lambda x: F.dropout(F.max_pool2d(x.contiguous(memory_format=torch.channels_last), 3, 3), 0.4), 6
    ),
    "pooling of a slice in channels_last": unary(pooled_slice, 6),
    "random numbers": unary(lambda x: [x + torch.rand_like(x), torch.randn_like(x), x.clone().uniform_()]),
    "new tensors": unary(lambda x: x * torch.ones_like(x) + x.new_full(x.shape, 2.0) + x.new_zeros(1)),
}


def written_slices(x: Tensor) -> list[Tensor]:
    first, second = x * 2, x * 3
    first[:, 1:3] = 0
    first[:, 0].mul_(x[:, 1])
    row, rest = second[:, :, 0], second[:, :, 1:]
    row.mul_(x[:, :, -1])
    rest[..., 0] = 5
    second.add_(1)
    return [first, second * row.unsqueeze(2), rest * 2]


# Operations for which all rows are gathered.
GATHERING: dict[str, Callable[[Draw], Any]] = {
    "writes of slices": unary(written_slices),
    "circular padding": unary(lambda x: F.pad(x, (1, 1, 1, 1), mode="circular") * 2, smallest=2),
    "sort": unary(lambda x: [*x.sort(2), x.cumsum(2) * 2, x.softmax(2)]),
    "dropout in another order": unary(lambda x: F.dropout(x.transpose(1, 3).cumsum(2), 0.4)),
    "masks": unary(lambda x: [x[x > 0], x.masked_fill(x > 0, 1.0)]),
    "one row": unary(lambda x: [x[:, :, 0] * 2, x.unbind(2)[-1] * 2, x.split(1, 2)[0] * 2]),
    "diagonal": unary(lambda x: x.diagonal(0, 1, 2) * 2),
    "patches": unary(lambda x: F.unfold(x, 2, stride=2) * 2, smallest=2),
    "maxima": unary(lambda x: [*x.max(2), x.argmax(), x.norm(), x.logsumexp((1, 2))]),
}


def check_rule(name: str, repetition: int) -> None:
    # With few rows for each rank all ranks have all rows. That is tried as well, but not in the first repetitions.
    is_divided = repetition % 4 < 2
    for attempt in range(ATTEMPTS):
        draw = random.Random(f"{name} {repetition} {attempt}")
        torch.manual_seed(repetition)
        function, inputs = CASES[name](draw)
        shape = inputs[0].shape
        if not is_divided or shape[2] >= 4:
            break
    # Weights are plain. A kernel may be as large as the images, but has another number in the first dimension.
    axes = [2 if (len(tensor), *tensor.shape[2:]) == (len(inputs[0]), *shape[2:]) else None for tensor in inputs]
    if len(inputs) == 2 and inputs[1].dim() == inputs[0].dim() - 1:
        axes = [2, 1]
    count = draw.randint(2, max(2, min(5, shape[2] // 2))) if is_divided else draw.randint(1, 5)
    gathered = check(function, inputs, axes, count)
    assert not gathered, f"{gathered} have gathered rows"


@pytest.mark.light
@pytest.mark.parametrize("name", CASES)
def test_rules_give_results_and_gradients_of_one_process(name: str) -> None:
    for repetition in range(REPETITIONS):
        check_rule(name, repetition)


@pytest.mark.cluster
@pytest.mark.parametrize("name", CASES)
def test_rules_give_results_and_gradients_of_one_process_for_many_sizes(name: str) -> None:
    for repetition in range(REPETITIONS, MANY_REPETITIONS):
        check_rule(name, repetition)


@pytest.mark.light
@pytest.mark.parametrize("name", GATHERING)
def test_other_operations_gather_rows_and_give_results_and_gradients_of_one_process(name: str) -> None:
    times_divided = 0
    for repetition in range(3 * REPETITIONS):
        draw = random.Random(f"{name} {repetition}")
        torch.manual_seed(repetition)
        function, inputs = GATHERING[name](draw)
        count = draw.randint(2, 4)
        is_divided = inputs[0].shape[2] >= 2 * count
        times_divided += is_divided
        assert bool(check(function, inputs, [2], count)) == is_divided
    assert times_divided
