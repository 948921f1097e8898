"""Tests of data-parallel training with compressed gradients."""

from functools import partial

import torch

from cnnstrategies.strategies import CompressedDDPStrategy
from tests.strategies.digit_runs import train

# By compression: its options, and the least and largest relative error of the weights after an epoch without momentum.
BOUNDS = {
    "fp16": ({}, 1e-6, 5e-3),
    "bf16": ({}, 1e-5, 5e-2),
    "powersgd": ({"powersgd_start_step": 2}, 1e-3, 10.0),
}


def test_compressed_gradients_stay_close_to_ddps() -> None:
    """The test runs a few steps only, because rounding differences grow with the number of steps.

    If a hook were not registered, and Lightning registers none on CPUs, the weights would be equal.
    """
    plain = {"optimizer": partial(torch.optim.SGD, lr=0.1), "lr_scheduler": None}
    options = {"model": plain, "max_epochs": 1, "limit_val_batches": 0}
    exact = train("exact", "ddp_fork", 2, **options)["state_dict"]
    for name, (more, least, most) in BOUNDS.items():
        strategy = CompressedDDPStrategy(name, **more, start_method="fork")
        state = train(name, strategy, 2, **options)["state_dict"]
        off = max(float((state[key] - value).norm() / value.norm()) for key, value in exact.items())
        assert least <= off <= most, (name, off)
