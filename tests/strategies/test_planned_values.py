"""The bytes that `plan` predicts for the values of a step's own code are those that the ranks send."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import Cluster
from cnnstrategies.planning.costs import GraphCosts, Link, NodeCost, Profile, Value
from cnnstrategies.planning.hybrid import hybrids
from cnnstrategies.planning.measure_values import step_values
from cnnstrategies.planning.step_values import StepValues
from cnnstrategies.strategies.hybrid_pipeline.metric_values import share_metrics
from tests.placed.turns import on_ranks
from tests.strategies.test_placed_loading import placed

pytestmark = pytest.mark.light
SAMPLES, SIZE, CLASSES, SMALL = 6, 24, 4, 1000
# Bytes of a message besides its tensors: header, subject, shapes, and the states of random generators.
BESIDES = 6000


class Module(nn.Module):
    """A segmentation network, and a step's loss.

    Args:
        loss: Function of the images, the network's output, the masks and the labels.
    """

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.network = nn.Conv2d(3, CLASSES, 1)
        self.metric = MeanMetric()
        self.loss = loss

    def step(self, batch: Any) -> Tensor:
        images, masks, labels = batch
        outputs = self.network(images)
        return self.loss(self, images, outputs, masks, labels)


def of_masks(module: Module, images: Tensor, outputs: Tensor, masks: Tensor, labels: Tensor) -> Tensor:
    """The last stage reads the masks. Which pixels count is computed where the masks are, and is not sent."""
    return (F.cross_entropy(outputs, masks, reduction="none") * (masks > 0)).mean()


def of_derived(module: Module, images: Tensor, outputs: Tensor, masks: Tensor, labels: Tensor) -> Tensor:
    """The first stage computes targets and weights from masks and images, and the last stage needs both."""
    weights = images.abs().mean(1)
    return (F.cross_entropy(outputs, (masks > 1).long(), reduction="none") * weights).mean()


def of_outputs(module: Module, images: Tensor, outputs: Tensor, masks: Tensor, labels: Tensor) -> Tensor:
    """The images are larger than the mean of the outputs, which is brought to the first stage."""
    return (images.square() * outputs.mean(1, keepdim=True)).mean()


def of_labels(module: Module, images: Tensor, outputs: Tensor, masks: Tensor, labels: Tensor) -> Tensor:
    """All ranks have the labels, which are small. A metric gets values of the last stage."""
    module.metric(outputs.detach().amax(1))
    return F.cross_entropy(outputs.mean((2, 3)), labels)


def data(batches: int) -> TensorDataset:
    torch.manual_seed(1)
    count = batches * SAMPLES
    masks = torch.randint(CLASSES, (count, SIZE, SIZE))
    return TensorDataset(torch.randn(count, 3, SIZE, SIZE), masks, torch.randint(CLASSES, (count,)))


def sent_in_the_second_step(loss: Callable[..., Tensor], replicas: tuple[int, int]) -> int:
    """Return the bytes that all ranks together send, besides those of the stages."""
    last = tuple(range(replicas[0], sum(replicas)))

    def program(places: Any) -> int:
        sizes: list[int] = []
        link, module = vars(places.messages)["_link"], Module(loss)
        send = link.send
        link.send = lambda target, message: (sizes.append(len(message)), send(target, message))
        share_metrics(places, [module])
        part = range(places.rank % replicas[0], 2 * SAMPLES, replicas[0])
        loader = DataLoader(data(2), SAMPLES // replicas[0], sampler=list(part))
        batches = iter(placed(places, loader, replicas, SMALL))
        # The stages' own messages have other connections, so this network needs none.
        result = torch.ones(SAMPLES, CLASSES, SIZE, SIZE)
        results: list[Tensor] = []

        def forward(images: Tensor) -> Tensor:
            results[:] = [places.give(result.clone(), last).requires_grad_()]
            return results[0]

        module.network.forward = forward
        for _ in range(2):
            sizes.clear()
            module.step(next(batches)).backward()
            places.settle_gradients(results)  # As the divided network's backward does.
        return sum(sizes)

    return sum(on_ranks(sum(replicas), program))


def planned(loss: Callable[..., Tensor]) -> StepValues:
    module, batch = Module(loss), next(iter(DataLoader(data(1), SAMPLES)))

    def prepare(places: Any) -> None:
        share_metrics(places, [module])

    return step_values(module.step, module, module.network, batch, SAMPLES, SMALL, True, prepare)


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("loss", [of_masks, of_derived, of_outputs, of_labels])
def test_a_plan_knows_the_bytes_that_the_ranks_send(loss: Callable[..., Tensor], replicas: tuple[int, int]) -> None:
    sent, predicted = sent_in_the_second_step(loss, replicas), planned(loss).sent_bytes(replicas)
    assert predicted <= sent <= predicted + BESIDES * sum(replicas), f"{planned(loss)}: {predicted} and {sent}"


def test_each_kind_of_value_is_counted() -> None:
    mask, outputs, images = SAMPLES * SIZE**2 * 8, SAMPLES * CLASSES * SIZE**2 * 4, SAMPLES * 3 * SIZE**2 * 4
    labels = SAMPLES * 8
    assert planned(of_masks) == StepValues(loaded=mask, shared=labels)
    # Targets and weights are brought to the last stage for the forward, and once more for the backward.
    derived = planned(of_derived)
    assert derived == StepValues(derived=derived.derived, shared=labels, joined=mask + images)
    assert derived.derived >= mask + mask // 2
    returned = planned(of_outputs)
    assert returned.returned == outputs // CLASSES <= returned.derived
    assert returned.joined == images
    assert planned(of_labels).shared == labels + outputs // CLASSES


def test_the_seconds_are_those_of_the_messages() -> None:
    cluster = Cluster.flat(3, Link(1e6, 0.5))
    values = StepValues(loaded=1000, derived=200, shared=10)
    assert values.sent_bytes((1, 2)) == 2000 + 400 + 20
    assert values.seconds(cluster, (1, 2)) == pytest.approx(2420 / 1e6 + 3 * 0.5)
    assert values.sent_bytes((2, 1)) == 2000 + 200 + 20
    assert StepValues(loaded=1000).sent_bytes((3,)) == 0


def test_a_plan_adds_the_time_the_bytes_and_the_memory_of_the_values() -> None:
    nodes = NodeCost("first", 0.1, 0.1, 1000, 1000), NodeCost("last", 0.1, 0.1, 1000, 1000)
    profile = Profile(GraphCosts(nodes, (Value(0, (1,), 100, 100),), (1,), 2, 300))
    job = Job(profile, Cluster.flat(2, Link(1e6, 0.0)), 4, 2, cuts=(1,), replicas=(1, 1))
    (plain,) = hybrids(job)
    (row,) = hybrids(replace(job, values=StepValues(loaded=5000, derived=1000)))
    assert row.step - plain.step == pytest.approx(0.006)
    assert row.sent_bytes - plain.sent_bytes == 6000
    assert [load.peak.images for load in row.loads] == [plain.loads[0].peak.images, 5000]
