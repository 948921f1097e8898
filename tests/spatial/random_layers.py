"""Random layers of random networks on divided images of 1 to 130 rows, compared with one process in float64.

`make test` tries a few networks. `make fuzz-spatial N=5000` tries more. A failure names its seed, which repeats it:
`python -m tests.spatial.random_layers 1 --first SEED`.
"""

import argparse
import random
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from cnnstrategies.spatial import convolutions
from tests.spatial.equality import check

# A layer gets the images and the weights, of which it takes its own, and returns images.
Layer = Callable[[Tensor, list[Tensor]], Tensor]
CHANNELS, LARGEST, MOST_RANKS = 4, 130, 5


class Network:
    """Random layers, and inputs for them.

    Attributes:
        count: Number of ranks.
        axis: The dimension that is divided.
        inputs: The images, and the weights of all layers.
        layers: The layers, in order.
        names: Description of each layer.
    """

    def __init__(self, seed: int) -> None:
        self._draw = draw = random.Random(seed)
        self._dimensions = draw.choice([1, 2, 2, 2, 3])
        self.count = draw.randint(1, MOST_RANKS)
        self.axis = 2 if draw.random() < 0.7 else draw.randrange(2, 2 + self._dimensions)
        # Many small sizes: then a rank has less rows than a halo, or none.
        size = draw.choice([draw.randint(1, 12), draw.randint(1, LARGEST)])
        self._sizes = [draw.randint(1, 7) for _ in range(self._dimensions)]
        self._sizes[self.axis - 2] = size
        images = torch.randn(2, CHANNELS, *self._sizes, dtype=torch.float64)
        if self._dimensions == 2 and draw.random() < 0.3:
            images = images.contiguous(memory_format=torch.channels_last)
        self.inputs, self.layers, self.names = [images], list[Layer](), list[str]()
        for _ in range(draw.randint(1, 3)):
            kinds = (self._convolution, self._convolution, self._transposed, self._pooling, self._norm, self._resizing)
            draw.choice(kinds)()

    def __call__(self, images: Tensor, *weights: Tensor) -> list[Tensor]:
        results, remaining = [], list(weights)
        for layer in self.layers:
            # The gradient of each layer's output is a different one.
            images = layer(images, remaining) * 1.5
            results.append(images)
        return results

    def _add(self, name: str, layer: Layer, sizes: list[int] | None = None) -> None:
        """Add a layer, unless the images would become empty or large."""
        if sizes is not None:
            if min(sizes) < 1 or max(sizes) > 2 * LARGEST:
                return
            self._sizes = sizes
        self.layers.append(layer)
        self.names.append(name)

    def _weight(self, *shape: int) -> None:
        self.inputs.append(torch.randn(*shape, dtype=torch.float64))

    def _options(self, most_padding: int) -> tuple[list[int], list[int], list[int], list[int]]:
        draw, count = self._draw, self._dimensions
        kernel = [draw.choice([1, 2, 3, 3, 4, 5, 7]) for _ in range(count)]
        stride, dilation = ([draw.choice([1, 1, 2, 3]) for _ in range(count)] for _ in range(2))
        padding = [draw.randint(0, most_padding) for _ in range(count)]
        if draw.random() < 0.5:
            # As in most networks.
            padding = [step * (length // 2) for length, step in zip(kernel, dilation, strict=True)]
        return kernel, stride, padding, dilation

    def _convolution(self) -> None:
        kernel, stride, padding, dilation = self._options(4)
        groups, has_bias = self._draw.choice([1, 2, CHANNELS]), self._draw.random() < 0.5
        options = zip(self._sizes, kernel, stride, padding, dilation, strict=True)
        reaches = [(n + 2 * p - d * (k - 1) - 1, s) for n, k, s, p, d in options]
        if min(reach for reach, _ in reaches) < 0:
            return
        function = getattr(F, f"conv{self._dimensions}d")

        def layer(images: Tensor, weights: list[Tensor]) -> Tensor:
            weight = weights.pop(0)
            result: Tensor = function(
                images, weight, weights.pop(0) if has_bias else None, stride, padding, dilation, groups
            )
            return result

        self._weight(CHANNELS, CHANNELS // groups, *kernel)
        if has_bias:
            self._weight(CHANNELS)
        name = f"convolution {kernel=} {stride=} {padding=} {dilation=} {groups=} {has_bias=}"
        self._add(name, layer, [reach // s + 1 for reach, s in reaches])

    def _transposed(self) -> None:
        kernel, stride, padding, dilation = self._options(2)
        groups = self._draw.choice([1, 2])
        extra = [self._draw.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)]
        options = zip(self._sizes, kernel, stride, padding, dilation, extra, strict=True)
        sizes = [(n - 1) * s - 2 * p + d * (k - 1) + 1 + e for n, k, s, p, d, e in options]
        if min(sizes) < 1 or max(sizes) > 2 * LARGEST:
            return
        function = getattr(F, f"conv_transpose{self._dimensions}d")
        self._weight(CHANNELS, CHANNELS // groups, *kernel)
        self._weight(CHANNELS)
        self._add(
            f"transposed {kernel=} {stride=} {padding=} {dilation=} {groups=} {extra=}",
            lambda x, weights: function(x, weights.pop(0), weights.pop(0), stride, padding, extra, groups, dilation),
            sizes,
        )

    def _pooling(self) -> None:
        draw, count = self._draw, self._dimensions
        kernel, stride, _, dilation = self._options(0)
        padding = [draw.randint(0, length // 2) for length in kernel]
        is_ceil, counts = draw.choice([False, True]), draw.choice([False, True])
        kind = draw.choice(["max", "max", "average", "adaptive"])
        if kind == "adaptive":
            size = [draw.randint(1, 9) for _ in range(count)]
            function = getattr(F, f"adaptive_avg_pool{count}d")
            self._add(f"adaptive pooling {size=}", lambda x, _: function(x, size), size)
            return
        if kind == "average":
            dilation = [1] * count
        sizes = []
        for n, k, s, p, d in zip(self._sizes, kernel, stride, padding, dilation, strict=True):
            reach = n + 2 * p - d * (k - 1) - 1
            if reach < 0 or (kind == "average" and n < k) or (kind == "max" and n < d):
                return  # torch refuses these sizes, or writes outside of the image where a window misses all of it.
            length = (reach + (s - 1) * is_ceil) // s + 1
            sizes.append(length - (is_ceil and (length - 1) * s >= n + p))
        function = getattr(F, f"{'max' if kind == 'max' else 'avg'}_pool{count}d")
        options: dict[str, Any] = {"dilation": dilation} if kind == "max" else {"count_include_pad": counts}
        self._add(
            f"{kind} pooling {kernel=} {stride=} {padding=} {is_ceil=} {options}",
            lambda x, _: function(x, kernel, stride, padding, ceil_mode=is_ceil, **options),
            sizes,
        )

    def _norm(self) -> None:
        kind = self._draw.choice(["batch", "group"])
        # The variance of two values may be close to 0.
        if min(self._sizes) * len(self._sizes) < 4:
            return
        self._weight(CHANNELS)
        self._weight(CHANNELS)

        def layer(images: Tensor, weights: list[Tensor]) -> Tensor:
            weight, bias = weights.pop(0), weights.pop(0)
            if kind == "group":
                return F.group_norm(images, 2, weight, bias, 0.1)
            return F.batch_norm(images, None, None, weight, bias, True, 0.1, 0.1)

        self._add(f"{kind} norm", layer)

    def _resizing(self) -> None:
        draw, count = self._draw, self._dimensions
        if draw.random() < 0.4:
            padding = [draw.randint(-1, 3) for _ in range(2 * count)]
            pairs = list(zip(padding[::2], padding[1::2], strict=True))[::-1]
            sizes = [size + sum(pair) for size, pair in zip(self._sizes, pairs, strict=True)]
            self._add(f"pad {padding}", lambda x, _: F.pad(x, padding, value=0.5), sizes)
            return
        linear = {1: "linear", 2: "bilinear", 3: "trilinear"}[count]
        mode = draw.choice(["nearest", "nearest-exact", linear, linear])
        options = {} if mode.startswith("nearest") else {"align_corners": draw.choice([False, True])}
        sizes = [draw.randint(1, min(LARGEST, 3 * size)) for size in self._sizes]
        if draw.random() < 0.5:
            sizes = [2 * size for size in self._sizes]
        self._add(f"{mode} to {sizes} {options}", lambda x, _: F.interpolate(x, sizes, mode=mode, **options), sizes)


def check_seed(seed: int) -> set[str]:
    """Check the network of a seed. Return the operations that gathered rows."""
    torch.manual_seed(seed)
    network = Network(seed)
    if not network.layers:
        return set()
    axes = [network.axis, *[None] * (len(network.inputs) - 1)]
    try:
        # Half of the networks convolve the edges by themselves wherever it is possible.
        with mock.patch.object(convolutions, "ROWS_PER_WEIGHT", seed % 2):
            return check(network, network.inputs, axes, network.count)
    except Exception as error:
        images = network.inputs[0]
        error.add_note(
            f"{seed=}: {tuple(images.shape)}, dimension {network.axis}, {network.count} ranks: {network.names}"
        )
        raise


def main() -> None:
    """Check the networks of many seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    for seed in range(options.first, options.first + options.number):
        gathered = check_seed(seed)
        assert not gathered, f"{seed=}: {gathered} gathered rows"
    print(f"{options.number} networks from seed {options.first} on are equal, in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
