"""Values go between processes as plain data: what is sent arrives, and what is not plain data is refused."""

import json
import math
import random
from pathlib import Path

import pytest
import torch

from cnnstrategies.paramserver.codec import DTYPES, CodecError, decode, encode

pytestmark = pytest.mark.light

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


def test_what_is_received_is_a_copy_that_can_be_written():
    tensor = torch.zeros(3)
    back = decode(encode(tensor))
    back += 1
    assert tensor.sum() == 0


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", {(1, 2): 3}, torch.zeros(2).to_sparse(), len])
def test_refuses_what_it_would_have_to_pickle(value):
    with pytest.raises(CodecError, match="cannot be sent"):
        encode(value)


def test_broken_messages_raise_one_error_and_allocate_nothing():
    frames = [bytes(frame) for frame in encode({"a": [torch.arange(6.0), "text", (1, 2.5)], "b": Path("x")})]
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
