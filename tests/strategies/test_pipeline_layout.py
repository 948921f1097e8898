"""The layout that a pipeline gets from its arguments, the network and the data."""

from types import SimpleNamespace

import pytest
import torch
from conftest import PlainCNN

from cnnstrategies.data import DigitsDataModule
from cnnstrategies.networks import SmallCNN
from cnnstrategies.strategies import HybridPipelineStrategy


@pytest.mark.parametrize(
    ("network", "data", "asked", "expected"),
    [
        (SmallCNN(10), DigitsDataModule(batch_size=32), None, 4),
        (SmallCNN(10), DigitsDataModule(batch_size=64), None, 8),
        (PlainCNN(), DigitsDataModule(batch_size=32), None, 8),
        (SmallCNN(10), DigitsDataModule(batch_size=32), 16, 16),
        (SmallCNN(10), None, None, 8),
        (SmallCNN(10), SimpleNamespace(batch_size=None), None, 8),
    ],
    ids=["batch norm", "larger batch", "no batch norm", "asked for", "loaders", "another data module"],
)
def test_batch_normalisation_and_the_batch_decide_on_the_microbatches(network, data, asked, expected):
    cut = "block1" if isinstance(network, SmallCNN) else "1"
    request = HybridPipelineStrategy(replicas=[1, 1], cuts=[cut], microbatches=asked).request
    trainer = SimpleNamespace(datamodule=data)
    layout = request.choose(network, trainer, 2, torch.device("cpu"), lambda size: None)
    assert layout.microbatches == expected
