"""Values are sent between processes as plain data: they arrive unchanged, and everything else is refused."""

import json
import math
import random
import sys
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_structure

from cnnstrategies.codec import DTYPES, CodecError, decode, encode, from_bytes, to_bytes

pytestmark = pytest.mark.light


class Box(NamedTuple):
    left: int
    image: torch.Tensor


@dataclass(frozen=True)
class Sample:
    name: str
    boxes: list[Box]

    def __post_init__(self) -> None:
        made.append(self.name)


made: list[str] = []  # Names of the samples whose `__post_init__` has run.

VALUE = {
    "none": None,
    "flags": (True, False),
    "numbers": [0, -1, 2**70, 1.5, 1e-300, math.inf, -math.inf],
    "text": "épsilon \n \x00",
    "path": Path("runs/version_0"),
    3: {"deep": [(), [], {}]},
}


def test_plain_values_arrive_with_their_types():
    back = decode(encode(VALUE))
    assert back == VALUE
    assert isinstance(back["flags"], tuple)
    assert isinstance(back["path"], Path)
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize("name", DTYPES)
def test_tensors_of_every_type_and_layout_arrive(name):
    values = torch.arange(24).reshape(2, 3, 4).to(DTYPES[name])
    for tensor in (values, values.transpose(0, 2), values[:, ::2], values[0, 0, 0], values[:0]):
        back = decode([bytes(frame) for frame in encode({"x": [tensor]})])["x"][0]
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor)
        assert back.shape == tensor.shape
        back.zero_()
        assert torch.equal(values, torch.arange(24).reshape(2, 3, 4).to(DTYPES[name])), "it is a copy"


def test_values_of_torch_and_numpy_arrive():
    values = [torch.float16, torch.device("cuda:1"), torch.channels_last, OrderedDict(b=1, a=2), deque([1], 3)]
    values.append(tree_structure({"b": [0, (1, Box(2, 3))], "a": deque([4])}))
    for value, back in zip(values, decode(encode(values)), strict=True):
        assert back == value
        assert type(back) is type(value)
    array = np.arange(6, dtype=np.uint32).reshape(2, 3).T
    back = decode(encode([array, array[0, 1]]))
    assert back[0].dtype == array.dtype
    assert np.array_equal(back[0], array)
    assert back[1] == 3
    row = decode(encode(torch.empty(3, 2, dtype=torch.float16, device="meta")))
    assert (row.shape, row.dtype, row.is_meta) == ((3, 2), torch.float16, True)


def test_records_arrive_by_class_and_none_of_their_code_runs():
    sent = Sample("a", [Box(3, torch.ones(2))])
    made.clear()
    back = from_bytes(to_bytes({"sample": sent}))["sample"]
    assert made == []
    assert type(back) is Sample
    assert type(back.boxes[0]) is Box
    assert (back.name, back.boxes[0].left) == ("a", 3)
    assert torch.equal(back.boxes[0].image, torch.ones(2))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("this:Never", []),  # The module `this` prints when it is imported.
        ("os:system", ["echo hostile"]),
        ("builtins:list", [[1]]),
        ("pathlib:Path", ["x"]),
        ("tests.test_codec:CodecError", []),
        ("tests.test_codec:made.append", []),
        ("tests.test_codec:Box", [1]),
        ("tests.test_codec:Sample", ["a", [], 3]),
        ("collections:OrderedDict", [[1], 7]),
        (["tests.test_codec"], []),
    ],
)
def test_a_message_can_create_only_records(name, parts):
    with pytest.raises(CodecError):
        decode([json.dumps(["o", name, parts]).encode()])
    assert "this" not in sys.modules


def local() -> Any:
    @dataclass
    class Local:
        number: int

    return Local(1)


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, b"bytes", {(1, 2): 3}, torch.zeros(2).to_sparse(), len, local(), np.array([object()])],
)
def test_values_that_would_have_to_be_pickled_are_refused(value):
    with pytest.raises(CodecError, match="cannot be sent"):
        encode(value)


def test_broken_messages_raise_one_error_and_allocate_nothing():
    plain = [torch.arange(6.0), "text", (1, 2.5), torch.int8, Sample("a", []), np.float64(2), tree_structure([1])]
    frames = [bytes(frame) for frame in encode({"a": plain, "b": Path("x")})]
    generator = random.Random(0)
    decoded = 0
    for _ in range(20_000):
        structure = bytearray(frames[0])
        for _ in range(generator.randint(1, 3)):
            structure[generator.randrange(len(structure))] = generator.randrange(256)
        buffers = [frames[1][: generator.randrange(30)]] if generator.random() < 0.3 else frames[1:]
        try:
            decode([bytes(structure), *buffers])
            decoded += 1
        except CodecError:
            pass
    assert 0 < decoded < 19_000
    huge = json.dumps(["x", 0, "float64", [2**40]]).encode()
    for message in ([], [b"[" * 100_000], [huge, b""], [b'["x", 0, "float32", [-1, -1]]', b"1234"], [b'["?"]']):
        with pytest.raises(CodecError):
            decode(message)
    whole = to_bytes([torch.arange(3.0), "text"])
    # Messages that are cut short, or that give wrong lengths:
    for message in (b"", whole[:8], whole[:16], whole[:-1], whole + b"x", b"\xff" * 8 + whole[8:], b"\0" * 8):
        with pytest.raises(CodecError):
            from_bytes(message)
