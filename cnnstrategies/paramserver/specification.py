"""The specification, which contains the settings on which all workers and servers of a run agree."""

import json
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.compression import AUTO, may_be_lossy, payload_names
from cnnstrategies.paramserver.joined_optimizers import members_of

Options = list[dict[str, Any]]  # For each parameter group: values of the hyperparameters by name.
# Hyperparameters of the first group in a run whose workers clip each step by limits of its own; 0 for no limit.
STEP_CLIP_NORM, STEP_CLIP_VALUE, STEP_GROUP = "step_clip_norm", "step_clip_value", "step_group"
Mode = Literal["sync", "async", "ssp", "local"]
if TYPE_CHECKING:
    PushCompression = str
    PullCompression = str
else:
    # At run time, these two types contain the names of all compressions, so that the command line's help shows the
    # names and its parser refuses any other.
    PushCompression = Literal[(*payload_names(), AUTO)]
    PullCompression = Literal[(*payload_names(pulls=True), AUTO)]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class ParameterInfo:
    """Name, shape and dtype of a trained parameter of the network."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Group:
    """A parameter group of the optimizer.

    Attributes:
        parameters: Indices into `Specification.parameters`, in the order in which the optimizer holds the parameters.
        options: By name: the group's hyperparameters at the start of the run.
        optimizer: Class path of the group's optimizer, if the run has several optimizers; otherwise empty.
    """

    parameters: tuple[int, ...]
    options: dict[str, Any]
    optimizer: str = ""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The user's options for workers and servers that do not depend on the network or the optimizer.

    Attributes:
        mode: ``sync``: all workers make a step together, with the mean of their gradients. ``async``: each gradient is
            applied when it arrives. ``ssp``: like ``async``, but no worker may be more than `staleness` steps ahead of
            the slowest worker. ``local``: each worker makes several optimizer steps of its own, and then pushes the
            difference between its parameters before and after these steps. The servers make an outer optimizer step
            with the mean of the workers' differences.
        staleness: For mode ``ssp``: number of steps that a worker may be ahead of the slowest worker. With 0 the mode
            is the same as ``sync``.
        compression: Compression of pushed gradients. With ``auto`` the workers choose the compression from their
            measurements.
        topk_density: Fraction of a slice's elements that the compression ``topk`` sends.
        pull_compression: Compression of pulled parameters. With ``auto`` the workers choose the compression. With
            ``topk`` and ``onebit`` the workers pull compressed differences from the values that they already hold. The
            servers keep the parameters in full precision.
        replication: Number of servers that hold each slice.
        timeout: Seconds without a message after which a process counts as dead. A worker ends with an error if a server
            is silent for more than 1.25 x `timeout` seconds, or 2 x `timeout` seconds if `replication` is above 1.
        max_joiners: Number of workers that may join the run in addition to its original workers.

    Raises:
        ConfigurationError: Options contradict each other or are out of range.
    """

    mode: Mode = "sync"
    staleness: int = 0
    compression: PushCompression = "none"
    topk_density: float = 0.01
    pull_compression: PullCompression = "none"
    replication: int = 1
    timeout: float = 60.0
    max_joiners: int = 0

    def __post_init__(self) -> None:
        for mistake in self._mistakes():
            raise ConfigurationError(mistake)

    @property
    def aggregates(self) -> bool:
        """Whether all workers make their steps together: in modes sync and local, and in mode ssp with staleness 0."""
        return self.mode in ("sync", "local") or (self.mode == "ssp" and self.staleness == 0)

    @property
    def pulls_changes(self) -> bool:
        """Whether workers may pull changes instead of values: compressed differences from the values that they hold.

        See :mod:`.server.store`.
        """
        if self.pull_compression == AUTO:
            return self.aggregates
        return may_be_lossy(self.pull_compression)

    def _mistakes(self) -> Iterator[str]:
        """Yield an error message for each mistake in the options. The error message says what the user must change."""
        yield from unknown_choices(
            self, {"mode": Mode, "compression": PushCompression, "pull_compression": PullCompression}
        )
        yield from too_small(self, {"staleness": 0, "replication": 1, "max_joiners": 0})
        if not 0 < self.timeout < math.inf:
            yield f"timeout={self.timeout}: use a finite number of seconds above 0, for example 10"
        if self.staleness and self.mode != "ssp":
            yield (
                f"staleness={self.staleness} has no effect with mode={self.mode!r}: remove staleness, or use mode='ssp'"
            )
        if not 0 < self.topk_density <= 1:
            yield f"topk_density={self.topk_density}: use a number above 0 and at most 1"
        if self.pulls_changes and not self.aggregates:
            yield (
                f"pull_compression={self.pull_compression!r} does not work with mode={self.mode!r}, because all "
                "workers must receive the same difference after a common step: use mode='sync' or mode='local', or "
                "pull_compression='fp16'"
            )


@dataclass(frozen=True)
class Specification(RunOptions):
    """The settings of a run. Every worker and server of the run has an equal specification.

    Attributes:
        parameters: The trained parameters, in the order in which the network first uses them, if that order is known.
        optimizer: Class path of the optimizer that the servers use, such as ``torch.optim.sgd.SGD``: the user's
            optimizer, or in mode ``local`` the outer optimizer.
        groups: The optimizer's parameter groups.
        workers: Number of workers that must join before the first step. If `per_node` is above 1, this is a number of
            nodes: one worker of each node must join before the first step.
        servers: Number of servers. Their ids are 0 to `servers` - 1.
        pipelined: For mode sync: whether a server updates a slice as soon as all pushes of this slice have arrived, and
            each push is also a pull. Values then arrive while gradients are still being sent. If a worker dies in the
            middle of a step, its gradient may be part of the step in some slices only.
        clip_norm: Largest allowed global L2 norm of the gradient; None for no clipping. In mode sync this limit applies
            to the mean gradient, and in the other modes to each worker's gradient.
        clip_value: Largest allowed absolute value of an element of the gradient; None for no clipping. In mode sync
            this limit applies to the mean gradient, and in the other modes to each worker's gradient.
        clips_each_step: Whether workers send with each step by how much its gradient is clipped, and the number of the
            first parameter group of the optimizer that makes the step, as three hyperparameters of the first parameter
            group. The limits then apply to the parameters that have a gradient in the step.
        is_joint: Whether the optimizer's step of a parameter depends on other parameters. One server then holds all
            parameters, and makes the steps of all of them together.
        slice_bytes: Largest size of a slice in bytes. Larger parameters are cut into several slices. If the optimizer
            needs whole tensors, parameters are not cut, and slices may be larger.
        session: Random number that identifies the run. Messages with a different number are dropped.
        number: Number of the specification: 0 at the start of the run, and 1 more each time that parameters were added
            to the optimizer.
        per_node: Number of worker processes on each node, if one of these processes pushes the mean of the node's
            gradients; 1 if every worker process pushes its own gradients.
    """

    parameters: tuple[ParameterInfo, ...]
    optimizer: str
    groups: tuple[Group, ...]
    workers: int
    servers: int = 1
    pipelined: bool = False
    clip_norm: float | None = None
    clip_value: float | None = None
    clips_each_step: bool = False
    is_joint: bool = False
    slice_bytes: int = 1 << 21
    session: int = field(default_factory=lambda: secrets.randbits(63))
    per_node: int = 1
    number: int = 0

    @property
    def held_names(self) -> list[str]:
        """Names of the parameters in the order in which the optimizer holds them.

        In an optimizer's state dict, the keys of the states are positions in this order.
        """
        return [self.parameters[index].name for group in self.groups for index in group.parameters]

    @property
    def optimizers(self) -> list[str]:
        """Class path of each parameter group's optimizer."""
        return [group.optimizer or self.optimizer for group in self.groups]

    @property
    def itemsize(self) -> int:
        """Largest number of bytes per element, over all parameters."""
        return max((DTYPES[parameter.dtype].itemsize for parameter in self.parameters), default=1)

    @property
    def most_workers(self) -> int:
        """Largest number of workers that the run can have at the same time, including joiners."""
        return self.workers + self.max_joiners

    @property
    def patience(self) -> float:
        """Seconds without a message after which a worker counts a server as unreachable and stops with an error.

        This time is longer than the coordinator's time-out. So the coordinator removes a dead server before this time
        is over, or the worker notices that the coordinator itself is dead. With `replication` above 1 the time is even
        longer, because a view without the dead server must arrive, after which other servers take over its slices.
        """
        return self.timeout * (2 if self.replication > 1 else 1.25)

    @property
    def deaf_after(self) -> float:
        """Seconds without a message between two live servers after which their connection counts as broken."""
        return 2 * self.timeout

    @classmethod
    def of(
        cls, named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer, workers: int, **options: Any
    ) -> "Specification":
        """Return the specification for an optimizer, with the current hyperparameters.

        Args:
            named_parameters: Names and parameters, as ``network.named_parameters()`` returns them. Parameters that the
                optimizer does not hold are left out.
            optimizer: The user's optimizer, or several joined optimizers.
            workers: Number of workers that must join before the first step.
            options: By name: other attributes of the specification.

        Raises:
            ConfigurationError: A hyperparameter cannot be sent to the servers, the optimizer holds a parameter that is
                not among the named parameters, or an attribute is out of range.
        """
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        named = [(name, parameter) for name, parameter in named_parameters if id(parameter) in held]
        index = {id(parameter): number for number, (_, parameter) in enumerate(named)}
        groups = []
        for group, group_options in zip(optimizer.param_groups, hyperparameters(optimizer), strict=True):
            for parameter in group["params"]:
                if id(parameter) not in index:
                    raise ConfigurationError(
                        f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not among the "
                        "network's named parameters: register it in the network, or remove it from the optimizer"
                    )
            groups.append(Group(tuple(index[id(parameter)] for parameter in group["params"]), group_options))
        kinds = [f"{type(member).__module__}.{type(member).__qualname__}" for member in members_of(optimizer)]
        if len(kinds) > 1:
            sizes = [len(member.param_groups) for member in members_of(optimizer)]
            paths = [kind for kind, size in zip(kinds, sizes, strict=True) for _ in range(size)]
            groups = [replace(group, optimizer=path) for group, path in zip(groups, paths, strict=True)]
        if options.get("clips_each_step"):
            groups[0].options.update({STEP_CLIP_NORM: 0.0, STEP_CLIP_VALUE: 0.0, STEP_GROUP: 0})
        infos = tuple(ParameterInfo(name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in named)
        return cls(infos, kinds[0], tuple(groups), workers, **options)

    def to_json(self) -> str:
        """Return this specification as a JSON text, from which :meth:`from_json` returns an equal specification."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Specification":
        """Return the specification from a JSON text that :meth:`to_json` returned.

        Raises:
            ConfigurationError: A field is unknown or out of range.
        """
        values = json.loads(text)
        unknown = set(values) - {entry.name for entry in fields(cls)}
        if unknown:
            raise ConfigurationError(f"the specification has unknown fields {sorted(unknown)}: remove them")
        values["parameters"] = tuple(
            ParameterInfo(p["name"], tuple(p["shape"]), p["dtype"]) for p in values["parameters"]
        )
        values["groups"] = tuple(Group(**{**g, "parameters": tuple(g["parameters"])}) for g in values["groups"])
        return cls(**values)

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        yield from too_small(self, {"workers": 1, "per_node": 1, "servers": 1, "slice_bytes": 64})
        if self.replication > self.servers:
            yield (
                f"replication={self.replication} needs at least {self.replication} servers, but "
                f"servers={self.servers}: start more servers, or lower replication"
            )
        if self.pipelined and (self.mode != "sync" or self.clip_norm is not None or self.clips_each_step):
            yield (
                "pipelined=True works only with mode='sync' and without clip_norm and clips_each_step: otherwise "
                "the update of a slice depends on other slices: remove pipelined"
            )
        if self.is_joint and (not self.aggregates or self.mode == "local" or self.pipelined or self.replication > 1):
            yield (
                "is_joint=True works only with mode='sync', replication=1 and without pipelined, because one server "
                "makes the steps of all parameters together: remove is_joint"
            )
        if self.pipelined and may_be_lossy(self.pull_compression):
            yield (
                f"pipelined=True does not work with pull_compression={self.pull_compression!r}, because with "
                "pipelined=True pushes request values and cannot request compressed differences: use "
                "pull_compression='fp16', or remove pipelined"
            )
        if self.mode == "local" and (self.clip_norm is not None or self.clip_value is not None):
            yield (
                "clip_norm and clip_value do not work with mode='local', in which workers push no gradients: clip the "
                "gradients in the worker's own optimizer step"
            )
        if self.clip_norm is not None and self.clip_value is not None:
            yield f"clip_norm={self.clip_norm} and clip_value={self.clip_value}: set only one of them"
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                yield f"{name}={value}: use a positive number, or None for no clipping"
        for parameter in self.parameters:
            if parameter.dtype not in DTYPES:
                yield (
                    f"parameter {parameter.name} has the dtype {parameter.dtype}, which servers do not support: use "
                    f"one of {', '.join(DTYPES)}"
                )
        listed = sorted(index for group in self.groups for index in group.parameters)
        if listed != list(range(len(self.parameters))):
            yield (
                "a parameter is in several parameter groups of the optimizer, or in none: put every parameter into "
                "exactly one group"
            )


def unknown_choices(options: object, choices: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error message for each option whose value is not allowed.

    Args:
        options: Object whose attributes are the options.
        choices: By option name: a ``Literal`` of the allowed values.
    """
    for name, choice in choices.items():
        if getattr(options, name) not in get_args(choice):
            yield f"{name}={getattr(options, name)!r}: use one of {', '.join(get_args(choice))}"


def too_small(options: object, least: Mapping[str, int]) -> Iterator[str]:
    """Yield an error message for each option whose value is too small.

    Args:
        options: Object whose attributes are the options.
        least: By option name: the smallest allowed value.
    """
    for name, value in least.items():
        if getattr(options, name) < value:
            yield f"{name}={getattr(options, name)}: use at least {value}"


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the hyperparameters of each parameter group by name, as values that JSON can represent.

    A tuple becomes a list, and a list, dictionary or dtype becomes a dictionary with one key. A number that the
    optimizer's own steps keep in a group, such as the number of steps, may be a tensor. It becomes a dictionary with
    the value and the dtype. :func:`.optimizers.restored_option` is the inverse.

    Raises:
        ConfigurationError: The type of a hyperparameter is not allowed. Numbers, strings, dtypes, None, and lists and
            dictionaries of these values are allowed.
    """
    return [
        {
            name: _plain(name, value, keeps_tensors=name not in optimizer.defaults)
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]


def _plain(name: str, value: Any, keeps_tensors: bool = False) -> Any:
    if keeps_tensors and isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point():
        return {"value": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        entries = [_plain(name, entry) for entry in value]
        return entries if isinstance(value, tuple) else {"list": entries}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _plain(name, entry) for key, entry in value.items()}}
    if isinstance(value, torch.dtype) and value in DTYPES.values():
        return {"dtype": str(value).removeprefix("torch.")}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigurationError(
        f"the optimizer's hyperparameter {name}={value!r} cannot be sent to the servers: use a number, a string, a "
        "dtype or a list of these"
    )
