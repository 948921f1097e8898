"""Loss scaling with parameters at places: an overflow on one rank makes all ranks skip the step."""

from typing import Any

import torch
from torch import nn

from cnnstrategies.placed import Places
from cnnstrategies.placed.hidden import hide_foreign_gradients
from tests.placed.placements import compare
from tests.placed.turns import on_ranks

AT = [(0,), (1,), None]
STEPS = 7
# Steps in which the gradient of a parameter has an element that is not finite, and the parameter.
OVERFLOWS = {1: 0, 3: 1, 4: 2}


def train(make: Any, unscales: bool, places: Places | None = None) -> tuple[Any, ...]:
    """Train with two optimizers, of which only the second has the gradients that are not finite."""
    generator = torch.Generator().manual_seed(1)
    parameters = []
    for index, place in enumerate([*AT, (1,)]):
        parameter = nn.Parameter(torch.randn(3, 2, generator=generator, dtype=torch.float64))
        if places is not None and place is not None:
            if places.rank in place:
                places.mark(parameter, place, f"p{index}")
            else:
                places.put_away(parameter, place, f"p{index}")
        parameters.append(parameter)
    optimizers = [make(parameters[3:]), make(parameters[:3])]
    if places is not None:
        for optimizer in optimizers:
            hide_foreign_gradients(places, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    made: list[int] = []
    for number, optimizer in enumerate(optimizers):
        optimizer.register_step_post_hook(lambda *_, number=number: made.append(number))
    scales = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = sum(parameter.square().sum() for parameter in parameters)
        loss = loss + (parameters[0] * parameters[1]).sum().sin() * parameters[2].mean()
        scaler.scale(loss).backward()
        if step in OVERFLOWS:
            gradient = parameters[OVERFLOWS[step]].grad
            assert gradient is not None
            gradient[1, 1] = float("inf" if step % 2 else "nan")
        for optimizer in optimizers:
            if unscales:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.5)
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return parameters, scales, made, scaler.state_dict()


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, 0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
}


def test_an_overflow_on_one_rank_makes_all_ranks_skip_the_step() -> None:
    for name, unscales in (("adamw", False), ("adamw", True), ("fused", False), ("fused", True), ("sgd", False)):
        expected = train(OPTIMIZERS[name], unscales)
        if name != "fused":  # torch calls the step of a fused optimizer, which then does nothing.
            assert expected[2].count(1) == STEPS - len(OVERFLOWS)
        assert expected[2].count(0) == STEPS

        def on_rank(places: Places, name: str = name, unscales: bool = unscales, expected: Any = expected) -> None:
            compare(places, train(OPTIMIZERS[name], unscales, places), expected)

        on_ranks(2, on_rank)
