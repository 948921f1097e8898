"""The page "Add a compression" is right: its class, in its one place, is everything that a compression needs."""

import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

from cnnstrategies.paramserver.compression import COMPRESSIONS, Compression, PayloadCompression, register
from cnnstrategies.paramserver.messages import Encoding
from tests.conftest import ROOT

PAGE = (ROOT / "docs/development/add-a-compression.md").read_text()
FILE = "cnnstrategies/paramserver/compression.py"
KNOWN = ("none", "fp16", "bf16", "topk", "onebit", "powersgd", "int8", "auto")


def known(names: Iterable[str]) -> list[str]:
    """Return the names of the built-in compressions and the page's compression, without others that were added."""
    return [name for name in names if name in KNOWN]


def use_extended_package(folder: Path) -> None:
    """Have this process import a copy of the package in which the page's class stands at the end of the page's file."""
    assert f"`{FILE}`" in PAGE
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    shutil.copytree(ROOT / "cnnstrategies", folder / "cnnstrategies", ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / FILE).open("a") as file:
        file.write("\n\n" + block)
    for name in list(sys.modules):
        if name.partition(".")[0] == "cnnstrategies" or name.startswith("tests.paramserver."):
            del sys.modules[name]
    sys.path.insert(0, str(folder))


def test_the_pages_class_in_its_one_place_is_enough(tmp_path: Path) -> None:
    """The test is not marked light: it runs in a process of its own, whose modules it replaces."""
    use_extended_package(tmp_path)
    import cnnstrategies
    from cnnstrategies.errors import ConfigurationError
    from cnnstrategies.paramserver.messages import known_encodings
    from cnnstrategies.paramserver.slicing import cut
    from cnnstrategies.paramserver.worker.codecs import ladder
    from cnnstrategies.strategies import CompressedDDPStrategy, ParameterServerStrategy
    from tests.paramserver.roles import PlainRoles

    assert Path(cnnstrategies.__file__).is_relative_to(tmp_path)
    assert 200 in known_encodings()

    # Training: with error feedback the rounding errors do not add up.
    gradient = torch.linspace(-1, 1, 400), torch.tensor([1.0, 1e-4, -1.0])
    values: dict[str, Any] = {}
    for name in ("none", "int8"):
        options: dict[str, Any] = {"compression": name, "pull_compression": name}
        directory = tmp_path / name
        directory.mkdir()
        with PlainRoles(directory, (400, 3), replication=2, servers=2, **options) as run:
            slices = cut(run.specification)
            assert max(len(slice_.parts) for slice_ in slices) == 1, "one slice for each parameter"
            worker, parameters = run.joined()
            for _ in range(40):
                run.step(worker, gradient)
            values[name] = [parameter.clone() for parameter in parameters]
            sent = worker.counters.bytes_sent
            assert (sent < 40 * 800) == (name == "int8")
    for exact, rounded in zip(values["none"], values["int8"], strict=True):
        torch.testing.assert_close(rounded, exact, rtol=0, atol=float(exact.abs().max()) / 100)
    assert not torch.equal(values["none"][0], values["int8"][0])

    # Small parameters share a slice only if nothing is left out.
    for name, parts in (("none", 3), ("fp16", 3), ("int8", 1)):
        directory = tmp_path / f"small-{name}"
        directory.mkdir()
        with PlainRoles(directory, (400, 3, 2, 2), compression=name) as run:
            assert max(len(slice_.parts) for slice_ in cut(run.specification)) == parts
    with PlainRoles(tmp_path, (40,), compression="auto") as run:
        assert known(pushes for pushes, _ in ladder(run.specification)) == ["none", "bf16", "int8", "onebit"]

    # Options.
    parser = ArgumentParser()
    parser.add_class_arguments(ParameterServerStrategy, "server")
    parser.add_class_arguments(CompressedDDPStrategy, "ddp")
    choices = re.findall(r"\{(none,[^}]*|fp16,[^}]*)\}", re.sub(r"\s+", "", parser.format_help()))
    shown = [",".join(known(names.split(","))) for names in choices]
    assert set(shown) == {"none,fp16,bf16,topk,onebit,int8,auto", "fp16,bf16,powersgd"}
    assert shown.count("none,fp16,bf16,topk,onebit,int8,auto") >= 2, "for pushes and for pulls"
    strategy = ParameterServerStrategy(compression="int8")
    assert strategy.options.compression == "int8"
    for refused, message in (
        ({"compression": "int9"}, "compression='int9': use one of none, .*int8"),
        ({"pull_compression": "int8", "mode": "async"}, "pull_compression='int8' does not work with mode='async'"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            ParameterServerStrategy(**refused)
    with pytest.raises(ConfigurationError, match="compression='int8': use one of fp16, bf16, powersgd"):
        CompressedDDPStrategy("int8")


@pytest.mark.light
def test_a_class_that_does_not_say_whether_it_is_lossy_is_refused() -> None:
    before = dict(COMPRESSIONS)
    silent = type("Silent", (Compression,), {"name": "silent"})
    with pytest.raises(TypeError, match="Silent does not set `lossy`"):
        register(silent)
    for error, faulty in (
        (TypeError, {"lossy": True}),
        (TypeError, {"lossy": True, "encoding": 9}),  # It lacks methods.
    ):
        with pytest.raises(error):
            register(type("Faulty", (PayloadCompression,), {"name": "faulty", **faulty}))
    whole = type(COMPRESSIONS["onebit"])
    for changed, message in (
        ({}, "already"),
        ({"name": "other", "pull_level": None}, "Again: encoding=5 is already in use for OneBit: .* 0, 1, 2, 3, 4"),
        (
            {"name": "other", "pull_level": None, "encoding": Encoding.KEYS},
            "encoding=6 .* with keys of slices",
        ),
        ({"name": "other", "encoding": 9}, "ladder of pulls"),
        ({"name": "other", "encoding": 256, "pull_level": None}, "encoding=256"),
    ):
        with pytest.raises(ValueError, match=message):
            register(type("Again", (whole,), changed))
    assert before == COMPRESSIONS


@pytest.mark.light
def test_the_pages_table_says_what_the_registry_says() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d*) ?\| (yes|no) \| (yes|no) \| (yes|no) \|$", PAGE, re.MULTILINE)
    assert len(rows) >= 6
    for name, encoding, lossy, ddp, pulls in rows:
        compression = COMPRESSIONS[name]
        payload = isinstance(compression, PayloadCompression)
        assert encoding == (str(int(compression.encoding)) if payload else "")
        assert (lossy, ddp) == tuple("yes" if flag else "no" for flag in (compression.lossy, compression.for_ddp))
        assert pulls == ("yes" if payload and compression.for_pulls else "no")
