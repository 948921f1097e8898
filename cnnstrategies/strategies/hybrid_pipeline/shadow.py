"""A LightningModule whose steps leave no trace: what they log, count, store and draw belongs to it alone."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection

from cnnstrategies._torch_private import OperationMode
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.own_forward import PLACE, WHOLE

FEW = 100  # Lists of more things are copied, and what is in them is not.
# Objects that a step uses and does not count with; to copy them would take time or break them.
_SHARED = (
    *(type, FunctionType, ModuleType, torch.device, torch.dtype, torch.Generator),
    *(nn.Module, Optimizer, Dataset, DataLoader, Trainer, LightningDataModule),
)


class MutedTrainer:
    """A trainer that is read alone: it has no loggers, and what is set on it is forgotten."""

    def __init__(self, trainer: Any) -> None:
        self._real = trainer
        self.loggers = [DummyLogger() for _ in trainer.loggers]
        self.logger = self.loggers[0] if self.loggers else None

    def __getattr__(self, name: str) -> Any:
        if name == "_real":
            raise AttributeError(name)
        return getattr(self._real, name)


def copy_metrics(module: nn.Module) -> dict[int, nn.Module]:
    """Copies of a module's metrics, by the identity of those."""
    copies: dict[int, nn.Module] = {}
    for metric in module.modules():
        if isinstance(metric, Metric | MetricCollection):
            copies[id(metric)] = copy.deepcopy(metric)  # Their methods are bound to the object.
    return copies


def shadow_of(
    module: LightningModule, path: str, network: nn.Module, metrics: Mapping[int, nn.Module]
) -> LightningModule:
    """A copy of a module as it is now, whose steps do not change it, with another network and other metrics.

    Its buffers, lists, numbers and small objects of the user's own classes are copies; parameters and data
    are the module's.
    """
    standing = dict(module.named_children()).get(PLACE) if path == WHOLE else module.get_submodule(path)
    made: dict[int, Any] = {**metrics, id(standing): network}
    shadow = _copied_module(module, made)
    if standing is None:
        vars(shadow)["forward"] = network
    shadow.trainer = MutedTrainer(module.trainer)
    for name in ("log", "log_dict", "print"):
        vars(shadow)[name] = _say_nothing
    result: LightningModule = shadow
    return result


def copy_of_module(module: LightningModule) -> LightningModule:
    """A copy of a module as it is now, of which all but parameters and data are copies, for hooks that change it."""
    result: LightningModule = _copied_module(module, {})
    return result


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Put the random numbers back afterwards as they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), isolate_rng(include_cuda=False):
        yield


class NoCollectives(OperationMode):  # type: ignore[no-untyped-call]
    """Refuses collectives of the user's own in a step that some of the ranks run alone: the others would never answer.

    What was raised is its ``refusal``, too, for those who catch what steps raise.
    """

    def __init__(self, module: LightningModule, step: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusal: ConfigurationError | None = None
        self._step = f"{type(module).__name__}.{step}"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation that is no collective."""
        if func.namespace == "c10d":
            name = func.name().partition("::")[2].strip("_")
            self.refusal = ConfigurationError(
                f"{self._step} calls a collective of torch.distributed ({name}), as losses do that gather the "
                "embeddings of all processes: with strategy hybrid_pipeline one rank runs this part of the step, on "
                "all samples, and no other would answer; leave the gathering out (gather_distributed=False), or use "
                "strategy ddp"
            )
            raise self.refusal
        return func(*args, **(kwargs or {}))


def _copied_module(module: nn.Module, made: dict[int, Any]) -> Any:
    if id(module) in made:
        return made[id(module)]
    made[id(module)] = shadow = object.__new__(type(module))
    attributes = dict(vars(module))
    children = attributes.pop("_modules")
    buffers = attributes.pop("_buffers")
    vars(shadow)["_modules"] = {name: child and _copied_module(child, made) for name, child in children.items()}
    vars(shadow)["_buffers"] = {name: buffer if buffer is None else buffer.clone() for name, buffer in buffers.items()}
    vars(shadow)["_parameters"] = dict(attributes.pop("_parameters"))
    vars(shadow).update({name: _copied(value, made) for name, value in attributes.items()})
    return shadow


def _copied(value: Any, made: dict[int, Any], depth: int = 3) -> Any:
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, MethodType) and id(value.__self__) in made:
        return MethodType(value.__func__, made[id(value.__self__)])
    if isinstance(value, Tensor):
        return value if isinstance(value, nn.Parameter) else value.detach().clone()
    if value is None or isinstance(value, (str, int, float, bytes, *_SHARED)) or not depth:
        return value
    if isinstance(value, (list, set, dict)):
        result: Any = copy.copy(value)
        if len(value) <= FEW and isinstance(value, list):
            result[:] = [_copied(one, made, depth - 1) for one in value]
        elif len(value) <= FEW and isinstance(value, dict):
            result.update({key: _copied(one, made, depth - 1) for key, one in value.items()})
        return result
    if not hasattr(value, "__dict__") or type(value).__module__.partition(".")[0] in ("torch", "lightning"):
        return value
    try:
        result = copy.copy(value)
        vars(result).update({name: _copied(one, made, depth - 1) for name, one in vars(value).items()})
    except Exception:
        return value
    return result


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    pass
