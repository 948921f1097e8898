"""Downloaded data sets: what is said when they cannot be had, and their shapes in memory."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cnnstrategies import ConfigurationError
from cnnstrategies.data import CIFAR10DataModule, CIFAR100DataModule, FashionMNISTDataModule, MNISTDataModule
from cnnstrategies.data.small_sets import tensors


def test_a_failed_download_names_data_set_directory_and_remedy(tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # Refuses every connection, also where there is a network.
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    for module in (MNISTDataModule, FashionMNISTDataModule, CIFAR10DataModule, CIFAR100DataModule):
        name = module.__name__.removesuffix("DataModule")
        with pytest.raises(ConfigurationError, match=f"no {name} in {tmp_path}/images: the download failed") as caught:
            module(root=tmp_path / "images").prepare_data()
        message = str(caught.value)
        assert "\n" not in message
        assert "data.init_args.root" in message
        assert "DigitsDataModule" in message
        with pytest.raises(ConfigurationError, match=f"no {name} in .*: it is not there.*{name} stores there"):
            module(root=tmp_path / "images", download=False).prepare_data()


@pytest.mark.light
def test_images_are_channels_first():
    for shape, expected in (((5, 28, 30), (5, 1, 28, 30)), ((5, 28, 30, 3), (5, 3, 28, 30))):
        channels_first(shape, expected)


def channels_first(shape, expected):
    data = np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)
    images, targets = tensors(SimpleNamespace(data=data, targets=[3, 1, 4, 1, 5]))
    assert images.shape == expected
    assert images.dtype == torch.uint8
    assert images.is_contiguous()
    assert images[2, 0, 7, 9] == (data[2, 7, 9] if data.ndim == 3 else data[2, 7, 9, 0])
    assert targets.dtype == torch.int64
    assert targets.tolist() == [3, 1, 4, 1, 5]
