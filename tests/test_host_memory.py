"""Tests of the memory that a host or a container has."""

from pathlib import Path

import pytest

from cnnstrategies.runtime.host_memory import host_memory

pytestmark = pytest.mark.light


def test_the_limit_of_a_container_is_read_from_its_control_group(tmp_path: Path) -> None:
    whole = host_memory(tmp_path)
    assert whole > 2**26
    for name, text, size in (
        ("memory.max", "max\n", whole),
        ("memory.max", "67108864\n", 2**26),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", 2**26),
        ("memory/memory.limit_in_bytes", "33554432\n", 2**25),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        assert host_memory(tmp_path) == size
