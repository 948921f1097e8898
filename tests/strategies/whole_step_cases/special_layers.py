"""Cases of layers that need more than tensors of known shapes: packed sequences, sparse gradients, checkpoints."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.strategies.whole_step_cases.base import CLASSES, Block, Classifier, Manual, StemBodyHead, case, classifier


@case(epochs=1, samples=28)
class SequenceHead(Classifier):
    """Reads packed sequences of the network's results, with attention behind them and a CTC loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(CLASSES, 5), nn.Linear(6, CLASSES)
        self.recurrent = nn.GRU(5, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, dropout=0.1)

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self(x)
        steps = torch.stack([z, self.embed(y), z.roll(1, 0), z.flip(1)], 1)
        lengths = (y % 3 + 2).sort(descending=True).values
        packed = nn.utils.rnn.pack_padded_sequence(steps, lengths, batch_first=True)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True, total_length=4)
        mixed, weights = self.attention(hidden, hidden, hidden)
        logs, ones = self.out(mixed).log_softmax(-1).transpose(0, 1), torch.ones(len(y), dtype=torch.long)
        loss = F.ctc_loss(logs, y.clamp(min=1)[:, None], lengths, ones, zero_infinity=True)
        return loss + F.cross_entropy(z, y) + weights.var()


class Sparse(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@case(epochs=1, samples=28)
class SparseGradients(Sparse):
    """An embedding outside of the network has sparse gradients, which a hook reads."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = nn.Embedding(CLASSES, CLASSES, sparse=True)

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x) + self.biases(y), y)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient: Any = self.biases.weight.grad
        rows = gradient.coalesce().values()
        self.history += [float(gradient.is_sparse), float(rows.abs().sum()), float(len(rows))]


class EmbeddingNet(StemBodyHead):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, 8, sparse=True)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.head(self.body(self.stem(x)).mean((2, 3)) + self.table(y))


@case(cuts=("stem", "body"), epochs=1, samples=28)
class SparseInside(Sparse):
    """An embedding in the network has sparse gradients."""

    network = EmbeddingNet

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x, y), y.roll(1))


@case(epochs=1, samples=28)
class SparseAdam(Manual):
    """An optimizer for sparse gradients trains a sum of embeddings, whose indices follow from the network's results."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(CLASSES, CLASSES, sparse=True, mode="sum")

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        scores = self(x)
        loss = F.cross_entropy(scores + self.bag(torch.stack([y, scores.argmax(1)], 1)), y)
        self.train_with(loss, *self.optimizers())

    def configure_optimizers(self) -> Any:
        sparse = torch.optim.SparseAdam(list(self.bag.parameters()), lr=0.05)
        return torch.optim.SGD(self.net.parameters(), lr=0.1), sparse


class CheckpointNet(nn.Module):
    """A network whose own forward calls its parts by checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 3, 2, 1), nn.Sequential(Block(), Block(), nn.Dropout(0.1), Block())
        self.last, self.head = Block(), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = checkpoint_sequential(self.body, 2, self.stem(x), use_reentrant=False)
        x = checkpoint(self.last, x, use_reentrant=False)
        return self.head(x.mean((2, 3)))


@case(cuts=("body.0", "body.1"), microbatches=1, epochs=1, samples=28)
class CheckpointsInForward(Classifier):
    network = CheckpointNet


class NormalisingLayer(nn.Conv2d):
    """A layer of torch that calls a BatchNorm layer twice."""

    def __init__(self) -> None:
        super().__init__(3, 8, 3, 2, 1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.relu(self.norm(super().forward(x))))


@case(epochs=1, samples=28)
class NormalisedTwice(Classifier):
    """The network runs batches as one microbatch."""

    def network(self) -> nn.Module:
        net = classifier()
        net[0] = NormalisingLayer()
        return net


class DictNet(StemBodyHead):
    """A network that takes a dictionary, and returns it with more entries."""

    def forward(self, batch: Any) -> Any:
        batch = {**batch, "features": self.body(self.stem(batch["image"]))}
        return {**batch, "scores": self.head(batch["features"].mean((2, 3)) + batch["bias"][:, None])}


@case(cuts=("stem", "body"), epochs=1, samples=28)
class UnpackedBatch(Classifier):
    network = DictNet

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        result = self.net({"image": x, "bias": 0.1 * y})
        self.history.append(float(len(result)))
        return F.cross_entropy(result["scores"], y) + 0.01 * result["features"].square().mean()


@case(error="late.weight gets its shape in the first forward")
class LazyHead(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.late = nn.LazyLinear(CLASSES)

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.late(self(x)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)
