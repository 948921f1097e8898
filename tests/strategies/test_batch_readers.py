"""Which ranks get the outputs and the large targets of a batch, in bytes, with ranks in memory."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import JaccardIndex

from cnnstrategies.placed import Places
from cnnstrategies.strategies.hybrid_pipeline import metric_values
from cnnstrategies.strategies.hybrid_pipeline.metric_values import share_metrics
from tests.placed.turns import MemoryLink, Turns
from tests.strategies.test_placed_loading import placed

pytestmark = pytest.mark.light
CLASSES, SAMPLES, SIZE, STEPS = 5, 4, 32, 3
MASK_BYTES, OUTPUT_BYTES = 8 * SAMPLES * SIZE**2, 4 * CLASSES * SAMPLES * SIZE**2
LITTLE = 4000  # Bytes of the messages about a batch or a step, without large tensors.


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return images with a channel for each class, which are the outputs of the network, and masks."""
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(SAMPLES, CLASSES, SIZE, SIZE, generator=generator),
            torch.randint(CLASSES, (SAMPLES, SIZE, SIZE), generator=generator),
        )
        for _ in range(STEPS)
    ]


def step(outputs: Tensor, masks: Tensor, metric: Any) -> list[float]:
    """Return what a step logs: the loss, and metrics of the last stage. The masks are changed in place, too."""
    outputs = outputs.requires_grad_()
    loss = F.cross_entropy(outputs, masks)
    loss.backward()
    masks[:, 0] = 0
    metric.update(outputs.detach(), masks)
    return [loss.item(), float((outputs.argmax(1) == masks.flatten(1).view_as(masks)).float().mean())]


@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1, 1)])
def test_masks_are_sent_once_to_ranks_that_read_them_and_outputs_to_no_other_rank(
    replicas: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step only logs its loss and metrics of the last stage. The first batch shows who reads the masks."""
    monkeypatch.setattr(metric_values, "SMALL", 1000)  # Larger arguments of metrics are not sent to all ranks.
    sources, world = range(replicas[0]), sum(replicas)
    last = world - 1
    sent: Counter[tuple[int, int, str, int]] = Counter()  # Bytes by sender, receiver, part of the step, and step.

    def program(rank: int, link: MemoryLink) -> Any:
        part, send, results = ("loader", 0), link.send, []

        def counted(target: int, message: Any) -> None:
            sent[rank, target, *part] += len(message)
            send(target, message)

        link.send = counted  # type: ignore[method-assign]
        with Places(rank, world, link) as places:
            metric = JaccardIndex(task="multiclass", num_classes=CLASSES)
            share_metrics(places, nn.ModuleList([metric]))
            data = batches() if rank in sources else []
            loader = placed(places, [tuple(t[rank :: replicas[0]] for t in batch) for batch in data], replicas)
            for index, ((_, masks), (logits, _)) in enumerate(zip(loader, batches(), strict=True)):
                part = ("step", index)
                results.append(step(places.give(logits, (last,)), masks, metric))
                part = ("loader", index + 1)
            results.append([float(metric.compute())])
        return results

    results, errors = Turns(world).run(program)
    assert not any(errors), errors
    metric = JaccardIndex(task="multiclass", num_classes=CLASSES)
    expected = [step(logits, masks, metric) for logits, masks in batches()]
    expected.append([float(metric.compute())])
    assert results == [[pytest.approx(values, rel=1e-6) for values in expected]] * world
    assert sent[0, last, "step", 0] > 3 * MASK_BYTES, "the loss, its backward and the metrics have read the masks"
    for index in range(1, STEPS):
        assert MASK_BYTES < sent[0, last, "loader", index] < MASK_BYTES + LITTLE
    for (sender, target, part, index), size in sent.items():
        is_mask = (target == last and (part == "loader" or not index)) or (sender in sources and target in sources)
        assert is_mask or size < LITTLE, (sender, target, part, index, size)
    assert OUTPUT_BYTES > LITTLE
