"""A LightningModule whose network is divided into stages, and what belongs to the whole: state, averages, metrics."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.own_forward import PLACE, network_at
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.whole import Groups, group_names, hold, merge_state, named_state, split_state
from cnnstrategies.strategies.hybrid_pipeline.contract import put_network
from cnnstrategies.strategies.hybrid_pipeline.placeholders import NetworkStandIn
from cnnstrategies.strategies.without_ddp import check_optimizer_states


class DividedModule:
    """Puts this rank's stage in the place of the module's network, until :meth:`restore`.

    Args:
        callbacks: Those of the trainer; the copies of the network that they average are divided, too.
        built_whole: Whether every rank has built the whole network, and not its own stage alone.
    """

    def __init__(
        self, module: LightningModule, path: str, pipeline: Pipeline, callbacks: Iterable[Any], built_whole: bool = True
    ) -> None:
        network = network_at(module, path)
        self.module = module
        self.path = path
        self.prefix = f"{path}." if path else ""
        self._place = f"{path or PLACE}."
        self.pipeline = pipeline
        self.network = network
        self._on_disk = not built_whole
        self.names = list(network.state_dict())
        # Layers that the network has in two places have two names there, and one in the graph.
        self._twins: dict[int, list[str]] = {}
        for name, tensor in network.state_dict(keep_vars=True).items():
            self._twins.setdefault(id(tensor), []).append(name)
        self.callbacks = list(callbacks)
        self._groups: dict[Optimizer, Groups] = {}
        own = set(pipeline.blueprint.state[pipeline.place.stage])
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            if built_whole and name not in own:
                tensor.data = torch.empty(0, dtype=tensor.dtype)  # Another rank holds it; `restore` brings it back.
        self.stand_in = NetworkStandIn(pipeline.module, path, network)
        put_network(module, path, self.stand_in)
        self._guard = network.register_forward_pre_hook(_refuse_call)
        # Each with its stage and its whole network.
        self._divided: list[tuple[LightningModule, nn.Module, nn.Module]] = [(module, pipeline.module, network)]
        self._divide_averages()
        self._metrics: list[tuple[Metric, Any]] = []
        for child in module.modules():
            if isinstance(child, Metric):
                # Every rank has counted the whole batch; torchmetrics would add them up.
                self._metrics.append((child, child.distributed_available_fn))
                child.distributed_available_fn = bool  # It returns False.

    @property
    def averages(self) -> bool:
        """Whether a callback averages weights."""
        return len(self._divided) > 1

    def _divide_averages(self) -> None:
        blueprint, stage = self.pipeline.blueprint, self.pipeline.place.stage
        for callback in self.callbacks:
            for value in vars(callback).values():
                if isinstance(value, AveragedModel) and isinstance(value.module, LightningModule):
                    copy = value.module
                    whole = network_at(copy, self.path)
                    part = blueprint.of(whole).build(stage).to(self.pipeline.device)
                    put_network(copy, self.path, NetworkStandIn(part, self.path, whole))
                    self._divided.append((copy, part, whole))

    @property
    def own(self) -> dict[str, nn.Parameter]:
        """This stage's parameters by the names that the network's `named_parameters` gives them."""
        names = set(self.pipeline.blueprint.state[self.pipeline.place.stage])
        parameters = self.pipeline.module.named_parameters(remove_duplicate=False)
        return {name: parameter for name, parameter in parameters if name in names}

    @property
    def names_of_parameters(self) -> dict[int, str]:
        """The names of this stage's parameters by their ids; those that average them have the same."""
        return {id(parameter): name for _, part, _ in self._divided for name, parameter in part.named_parameters()}

    def divide_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Leave each optimizer, which has the parameters of all stages, this one's alone; move its state there."""
        names = {parameter: name for name, parameter in self.network.named_parameters()}
        self._groups = {optimizer: group_names(optimizer, names) for optimizer in optimizers}
        for optimizer, groups in self._groups.items():
            hold(optimizer, self.own, groups)
            if optimizer.state:
                optimizer.load_state_dict(optimizer.state_dict())  # Moves it to the parameters' device.

    def check_groups(self) -> None:
        """Refuse parameters that a hook has given to an optimizer: of other stages they would be missing."""
        own = self.own
        for optimizer, groups in self._groups.items():
            sizes = [len([name for name in names if name in own]) for names in groups]
            if sizes != [len(group["params"]) for group in optimizer.param_groups]:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} has other parameters than configure_optimizers gave it: with strategy "
                    "hybrid_pipeline give it all from the beginning and unfreeze some later"
                )

    def whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Replace this stage's part of a state dict of the module by that of all stages on rank 0; a collective."""
        there = [name for name in state if name.startswith(self._place)]
        own = {self.prefix + name.removeprefix(self._place): state[name] for name in there}
        parts = self.pipeline.collect(own, self._on_disk)
        if parts is None:
            return state
        merged = {name: value for part in parts for name, value in part.items()}
        for twins in self._twins.values():
            held = next(merged[self.prefix + name] for name in twins if self.prefix + name in merged)
            merged |= {self.prefix + name: held for name in twins}
        ordered = {self.prefix + name: merged[self.prefix + name] for name in self.names}
        return {**ordered, **{name: value for name, value in state.items() if name not in there}}

    def own_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """This stage's part of a state dict of the whole module, with every key that is none of the network's."""
        place = {self.prefix + name: self._place + name for name in self.names}
        own = self.module.state_dict().keys()
        return {
            place.get(name, name): value for name, value in state.items() if name not in place or place[name] in own
        }

    def whole_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """On rank 0 an optimizer's state over the whole network, as one process would save it; a collective."""
        if optimizer not in self._groups:
            return optimizer.state_dict()  # Of a fit that has ended: it is whole.
        groups = self._groups[optimizer]
        parts = self.pipeline.collect(named_state(optimizer, self.own, groups), self._on_disk)
        return {} if parts is None else merge_state(optimizer, parts, groups)

    def load_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load this stage's part of the optimizers' states over the whole network."""
        check_optimizer_states(len(states), len(self._groups))
        for (optimizer, groups), state in zip(self._groups.items(), states, strict=True):
            optimizer.load_state_dict(split_state(state, self.own, groups))

    def restore(self, merge: bool) -> None:
        """Put the whole network back.

        To ``merge`` is to bring the weights of all stages together on every rank, and the optimizers' states on rank 0,
        a collective; else the network has those of this stage alone.
        """
        self._guard.remove()
        for module, part, network in self._divided:
            if merge:
                state = dict((*network.named_parameters(), *network.named_buffers()))
                for name, value in self.pipeline.merge((part, network)).items():
                    state[name].data = value
            put_network(module, self.path, network)
        if merge:
            self._restore_optimizers()
        for metric, available in self._metrics:
            metric.distributed_available_fn = available

    def _restore_optimizers(self) -> None:
        parameters = dict(self.network.named_parameters())
        for optimizer, groups in self._groups.items():
            state = self.whole_optimizer_state(optimizer)
            hold(optimizer, parameters, groups)
            if state:
                optimizer.load_state_dict(state)


def _refuse_call(network: nn.Module, inputs: Any) -> None:
    raise ConfigurationError(
        f"the whole {type(network).__name__} is called, which is divided: call it in the steps by the attribute that "
        "it was found by, and keep it in no list or variable beside"
    )
