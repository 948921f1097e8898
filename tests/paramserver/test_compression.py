"""Encodings decode to the expected values, and error feedback makes up for the parts that they leave out."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.compression import FP16, SAMPLE, Encoder, TopK, check_length, decode, largest
from cnnstrategies.paramserver.messages import InvalidMessageError
from cnnstrategies.paramserver.slicing import cut
from cnnstrategies.paramserver.specification import Specification, hyperparameters
from cnnstrategies.paramserver.worker.counters import Counters
from cnnstrategies.paramserver.worker.outgoing import Outgoing

pytestmark = pytest.mark.light


def sent(encoder: Encoder, gradient: torch.Tensor) -> torch.Tensor:
    payload = memoryview(encoder.encode(gradient)).cast("B")
    encoding = encoder.compression.encoding
    check_length(len(payload), encoding, gradient.numel(), gradient.dtype)
    return decode(payload, encoding, gradient.numel(), gradient.dtype)


def test_without_compression_gradients_are_neither_changed_nor_copied() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        gradient = torch.randn(33).to(dtype)
        got = sent(Encoder("none", 0.1), gradient)
        assert torch.equal(got, gradient)
        assert got.data_ptr() == gradient.data_ptr()


def test_half_precision_rounds_and_clips_to_its_range() -> None:
    gradient = torch.randn(100)
    for compression in ("fp16", "bf16"):
        torch.testing.assert_close(sent(Encoder(compression, 0.1), gradient), gradient, rtol=1e-2, atol=1e-3)
    payload = FP16().encode_values(torch.tensor([1e6, -1e6, 0.5]))
    assert decode(payload, FP16.encoding, 3, torch.float32).tolist() == [65504, -65504, 0.5]


@pytest.mark.parametrize("width", [4, 4000])
def test_a_gradient_beyond_fp16_is_refused_by_name(width: int) -> None:
    """Check parameters with slices of their own and shared slices. Infinities and NaN are sent unchanged."""
    network = nn.Sequential(nn.Linear(width, 1), nn.Linear(1, 1))
    optimizer, sink = torch.optim.SGD(network.parameters(), 0.1), lambda *_, **__: 0
    to: Any = SimpleNamespace(view=SimpleNamespace(servers=()), send=sink, primary=sink)

    def push(compression: str, value: float) -> None:
        specification = Specification.of(network.named_parameters(), optimizer, 1, compression=compression)
        parameters = list(network.parameters())
        outgoing = Outgoing(specification, cut(specification), to, Counters())
        outgoing.begin(7, hyperparameters(optimizer), 1.0)
        for index, parameter in enumerate(parameters):
            outgoing.push(index, torch.full_like(parameter, 1.0 if index else value))
        outgoing.finish()

    for value in (65504.0, float("inf"), float("nan")):
        push("fp16", value)
    push("bf16", 1e6)
    with pytest.raises(ConfigurationError, match=r"step 7: the gradient of 0\.weight contains the number 1e\+06.*bf16"):
        push("fp16", -1e6)


@pytest.mark.parametrize("total", [7, SAMPLE, 8 * SAMPLE, 12 * SAMPLE + 5])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_selecting_the_largest_elements_by_a_sample_is_exact(total: int, share: float) -> None:
    torch.manual_seed(0)
    spread = torch.randperm(total).float()  # All elements differ.
    rare = torch.zeros(total)
    rare[torch.randperm(total)[: total // 100 + 1]] = 1.0 + torch.rand(total // 100 + 1)
    broken = spread.clone()
    broken[total // 2] = float("nan")
    count = max(1, round(share * total))
    for values in (spread, rare, torch.zeros(total), broken):
        chosen = largest(values, count)
        assert torch.equal(chosen, chosen.unique()), "each index occurs once, in rising order"
        expected = values.topk(count).values.nan_to_num(nan=-1.0).sort().values
        assert torch.equal(values[chosen].nan_to_num(nan=-1.0).sort().values, expected)


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        ([1.0, -2.0, 3.0, 0.0, -4.0], [2.0, -2.0, 2.0, -2.0, -2.0]),
        ([1.0, 3.0, 0.0] * 6, [2.0, 2.0, 0.0] * 6),
        ([5.0] * 8, [5.0] * 8),
        ([-1.0, -3.0], [-2.0, -2.0]),
        ([0.0] * 9, [0.0] * 9),
    ],
)
def test_onebit_sends_the_means_above_and_below_zero(gradient: list[float], expected: list[float]) -> None:
    for dtype in (torch.float32, torch.float64):
        assert sent(Encoder("onebit", 0.1), torch.tensor(gradient, dtype=dtype)).tolist() == expected


@pytest.mark.parametrize("indices", [[0, 0], [1, 0], [0, 10]])
def test_topk_refuses_indices_that_are_not_rising_or_too_large(indices: list[int]) -> None:
    payload = torch.tensor(indices, dtype=torch.int32).numpy().tobytes() + bytes(8)
    with pytest.raises(InvalidMessageError, match="indices"):
        decode(memoryview(payload), TopK.encoding, 10, torch.float32)
    with pytest.raises(InvalidMessageError, match="indices"):
        TopK().check(memoryview(payload), 10)
