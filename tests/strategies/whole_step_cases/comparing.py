"""Cases of losses that compare the samples of a batch, or look at all pixels of a batch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.strategies.whole_step_cases.base import CLASSES, Classifier, Dense, case, classifier, dense


def nt_xent(embeddings: Tensor, temperature: float = 0.5) -> Tensor:
    """Return the normalised cross entropy of SimCLR. Row i and row i + n/2 are views of the same image."""
    z = F.normalize(embeddings, dim=1)
    pairs = len(z) // 2
    similarity = (z @ z.T / temperature).masked_fill(torch.eye(2 * pairs, dtype=torch.bool), float("-inf"))
    return F.cross_entropy(similarity, torch.arange(2 * pairs).roll(pairs))


def gathered(values: Tensor) -> Tensor:
    """Return the values of all processes, with a gradient of those of this process."""
    if not dist.is_initialized():
        return values
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values.detach())
    parts[dist.get_rank()] = values
    return torch.cat(parts)


@case()
class GatheredContrast(Classifier):
    """Gathers labels and embeddings over all processes, as losses for several GPUs do, before and after the network."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.history += [dist.get_rank(), dist.get_world_size()] if dist.is_initialized() else [0, 1]
        labels = gathered(y)
        similarity = gathered(self.net(x)) @ self.net(x.flip(-1)).T
        return F.binary_cross_entropy_with_logits(similarity, (labels[:, None] == y).to(similarity.dtype))


@case()
class SimclrWithHead(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(CLASSES, 6)

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nt_xent(self.projection(torch.cat([self.net(x[..., 1:]), self.net(x.roll(1, -1))])))


@case()
class Arcface(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(CLASSES, CLASSES))
        self.scale = nn.Parameter(torch.tensor(4.0))

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        cosine = F.normalize(self.net(x)) @ F.normalize(self.proxies).T
        angle = torch.acos(cosine.clamp(-1 + 1e-7, 1 - 1e-7))
        logits = torch.where(F.one_hot(y, CLASSES).bool(), torch.cos(angle + 0.3), cosine)
        return F.cross_entropy(self.scale * logits, y)


@case()
class DiceOverBatch(Dense):
    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        predicted = self.net(x).sigmoid()[:, 0]
        target = (x[:, 0] > 0).to(predicted)
        return 1 - (2 * (predicted * target).sum() + 1) / (predicted.sum() + target.sum() + 1)


@case()
class TopkHardNegatives(Classifier):
    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(self.net(x), dim=1)
        distances = torch.cdist(z, z)
        same = y[:, None] == y[None]
        hard = distances.masked_fill(same, 9.0).topk(2, largest=False).values
        near = distances[same & ~torch.eye(len(y), dtype=torch.bool)]
        return F.relu(1.0 - hard).mean() + (near.mean() if near.numel() else 0.0)


@case()
class SemiHardNegatives(Classifier):
    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(self.net(x), dim=1)
        distances = torch.cdist(z, z)
        closer = distances.detach() < distances.detach().median()
        rows, columns = torch.where((y[:, None] != y[None]) & closer)
        return F.relu(1.2 - distances[rows, columns]).sum() / max(len(rows), 1) + z.square().mean()


# The cases from here on are not in the reproductions or the prototypes.


@case()
class BatchHardTriplet(Classifier):
    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.net(x)
        distances = (z.unsqueeze(1) - z.unsqueeze(0)).square().sum(-1).add(1e-8).sqrt()
        same = y.unsqueeze(1) == y.unsqueeze(0)
        farthest = distances.masked_fill(~same, 0).amax(1)
        nearest = distances.masked_fill(same, float("inf")).amin(1)
        usable = torch.isfinite(nearest)
        if not usable.any():
            return z.sum() * 0
        return F.relu(farthest - nearest + 0.5)[usable].mean()


@case()
class SupervisedContrastive(Classifier):
    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(torch.cat([self.net(x), self.net(x.flip(-1))]), dim=1)
        labels = y.repeat(2)
        others = ~torch.eye(len(z), dtype=torch.bool)
        logits = z @ z.T / 0.3
        logits = logits - logits.max(1, keepdim=True).values.detach()
        log_probability = logits - (logits.exp() * others).sum(1, keepdim=True).log()
        positives = (labels[:, None] == labels[None]) & others
        return -((log_probability * positives).sum(1) / positives.sum(1)).mean()


@case()
class BarlowTwins(Classifier):
    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        left, right = self.net(x), self.net(x.flip(-2))
        left, right = ((z - z.mean(0)) / (z.std(0) + 1e-6) for z in (left, right))
        correlation = left.T @ right / len(x)
        diagonal = torch.diagonal(correlation)
        return (diagonal - 1).square().sum() + 0.01 * (correlation.square().sum() - diagonal.square().sum())


@case()
class Vicreg(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.expander = nn.Sequential(nn.Linear(CLASSES, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8))

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        left, right = (self.expander(self.net(view)) for view in (x, x + 0.2 * torch.randn(x.shape)))
        loss = 25 * F.mse_loss(left, right)
        for z in (left, right):
            z = z - z.mean(dim=0)
            loss = loss + 2.5 * F.relu(1 - torch.sqrt(z.var(dim=0) + 1e-4)).mean()
            covariance = (z.T @ z) / (len(z) - 1)
            loss = loss + covariance.fill_diagonal_(0).pow(2).sum() / z.shape[1]
        return 0.01 * loss


@case()
class CenterLoss(Classifier):
    """Moves a buffer of centres, one for each class, by the batch's embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centers", torch.zeros(CLASSES, CLASSES))

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.net(x)
        with torch.no_grad():
            for label in y.unique():
                self.centers[label] = 0.9 * self.centers[label] + 0.1 * z[y == label].mean(0)
        return F.cross_entropy(z, y) + 0.05 * (z - self.centers[y]).square().sum(1).mean()


@case()
class LovaszSoftmax(Classifier):
    """Sorts the errors of all pixels of a batch."""

    def network(self) -> nn.Module:
        return dense(2)

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.net(x).softmax(1)[:, 1].flatten()
        target = (x.mean(1) > 0).double().flatten()
        errors, order = torch.sort((target - scores).abs(), descending=True)
        target = target[order]
        intersection = target.sum() - target.cumsum(0)
        jaccard = 1 - intersection / (target.sum() + (1 - target).cumsum(0))
        jaccard[1:] = jaccard[1:] - jaccard[:-1]
        return torch.dot(errors, jaccard)


@case()
class PairwiseRanking(Classifier):
    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.net(x)[:, 0]
        positive, negative = scores[y > 2], scores[y <= 2]
        if len(positive) == 0 or len(negative) == 0:
            return F.binary_cross_entropy_with_logits(scores, (y > 2).to(scores))
        return F.softplus(negative[None] - positive[:, None]).mean()


@case()
class DeepCoral(Classifier):
    """The first half of a batch has labels. The covariances of both halves' outputs should be equal."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        source, target = self.net(x).chunk(2)
        difference = torch.cov(source.T) - torch.cov(target.T)
        return F.cross_entropy(source, y[: len(source)]) + difference.square().sum() / (4 * CLASSES**2)


@case()
class MaximumMeanDiscrepancy(Classifier):
    def network(self) -> nn.Module:
        return classifier(middle=nn.GroupNorm(2, 8))

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.net(x)
        half = len(z) // 2
        distances = torch.cdist(z, z).square()
        kernel = sum(torch.exp(-distances / (width * distances.detach().mean())) for width in (0.5, 1.0, 2.0))
        term = kernel[:half, :half].mean() + kernel[half:, half:].mean() - 2 * kernel[:half, half:].mean()
        return F.cross_entropy(z, y) + term


@case()
class OnlineHardExamples(Classifier):
    """Keeps the hardest 70 % of the samples for the loss."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        kept = int(0.7 * losses.numel())
        hardest, _ = losses.topk(kept)
        return hardest.mean()
