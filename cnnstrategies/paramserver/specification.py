"""The settings that all workers and servers of a run share, and their form as JSON."""

import json
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.compression import AUTO, may_be_lossy, payload_names
from cnnstrategies.paramserver.messages import InvalidMessageError

Options = list[dict[str, Any]]  # hyper-parameters by name, for each parameter group
Mode = Literal["sync", "async", "ssp", "local"]
if TYPE_CHECKING:
    PushCompression = str
    PullCompression = str
else:  # The command line's help lists these names, and its parser refuses other names.
    PushCompression = Literal[(*payload_names(), AUTO)]
    PullCompression = Literal[(*payload_names(pulls=True), AUTO)]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class ParameterInfo:
    """Name, shape and dtype of a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Group:
    """A parameter group of the optimizer.

    Attributes:
        parameters: Indices into `Specification.parameters`, in the optimizer's order.
        options: The group's hyper-parameters at the start.
    """

    parameters: tuple[int, ...]
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """A user's options for workers and servers, whatever they train.

    Attributes:
        mode: ``sync``: all workers make a step together, on their mean gradient. ``async``: each gradient is applied
            when it arrives. ``ssp``: as async, but no worker may be more than `staleness` steps ahead of the slowest.
            ``local``: workers make their own steps and push the difference to the parameters with which they began; the
            servers make the outer step on the mean difference.
        staleness: For ssp; 0 is the same as sync.
        compression: Encoding of pushed gradients; with ``auto`` the workers measure and choose.
        topk_density: Share of a slice's elements that ``topk`` sends.
        pull_compression: Encoding of pulled parameters; with ``auto`` the workers choose. With ``topk`` and ``onebit``
            workers pull the changes of each common step. The servers keep the parameters in full precision.
        replication: Number of servers that hold each slice.
        timeout: Seconds of silence after which a worker gives up a server.
        max_joiners: Number of workers that may join in addition.

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
        """Whether a step waits for all workers: sync, local, and ssp with staleness 0."""
        return self.mode in ("sync", "local") or (self.mode == "ssp" and self.staleness == 0)

    @property
    def pulls_changes(self) -> bool:
        """Whether workers pull compressed changes of the parameters; with ``auto``, whether they may do so."""
        if self.pull_compression == AUTO:
            return self.aggregates
        return may_be_lossy(self.pull_compression)

    def _mistakes(self) -> Iterator[str]:
        """Yield a message for each mistake, with the remedy."""
        yield from unknown_choices(
            self, {"mode": Mode, "compression": PushCompression, "pull_compression": PullCompression}
        )
        yield from too_small(self, {"staleness": 0, "replication": 1, "max_joiners": 0})
        if not 0 < self.timeout < math.inf:
            yield f"timeout={self.timeout}: use a number of seconds above 0; 10 is usual"
        if self.staleness and self.mode != "ssp":
            yield f"staleness={self.staleness} is for mode='ssp', not mode={self.mode!r}: leave it out"
        if not 0 < self.topk_density <= 1:
            yield f"topk_density={self.topk_density}: use more than 0 and at most 1"
        if self.pulls_changes and not self.aggregates:
            yield (
                f"pull_compression={self.pull_compression!r} with mode={self.mode!r}: servers send one change to all "
                "workers, which they have in common steps only: use mode='sync' or 'local', or pull_compression='fp16'"
            )


@dataclass(frozen=True)
class Specification(RunOptions):
    """The settings that all workers and servers of a run share; every process has the same.

    Attributes:
        parameters: The trained parameters, in the order of their first use as far as it is known.
        optimizer: Class path of the user's optimizer, such as ``torch.optim.sgd.SGD``; in mode ``local`` of the outer
            optimizer.
        groups: The optimizer's parameter groups.
        workers: Number of workers that the first step waits for.
        servers: Number of servers; their ids are 0 to `servers` - 1.
        pipelined: For sync: a slice is updated as soon as its own pushes have arrived, and each push is also a pull, so
            that values arrive while gradients are still sent. The last step of a worker that dies may contain only a
            part of its gradients.
        clip_norm: Largest global L2 norm of a gradient: of the mean gradient in sync, otherwise of each worker's own.
        clip_value: Largest absolute value of a gradient's elements, of the same gradients.
        slice_bytes: Largest slice of a parameter, except for optimizers that need whole tensors.
        session: Random number of this run: messages of another run are dropped.
        per_node: Number of processes that count as one worker, because they push once for all, as those of a node may.
    """

    parameters: tuple[ParameterInfo, ...]
    optimizer: str
    groups: tuple[Group, ...]
    workers: int
    servers: int = 1
    pipelined: bool = False
    clip_norm: float | None = None
    clip_value: float | None = None
    slice_bytes: int = 1 << 21
    session: int = field(default_factory=lambda: secrets.randbits(63))
    per_node: int = 1

    @property
    def itemsize(self) -> int:
        """Number of bytes of an element in the parameters' largest data type."""
        return max((DTYPES[parameter.dtype].itemsize for parameter in self.parameters), default=1)

    @property
    def most_workers(self) -> int:
        """Largest number of workers at a time."""
        return self.workers + self.max_joiners

    @property
    def patience(self) -> float:
        """Seconds of silence after which a worker gives up a server.

        The coordinator acts earlier: after the time-out it removes dead members, or is silent itself. A server whose
        slices have copies leaves the view some time later.
        """
        return self.timeout * (2 if self.replication > 1 else 1.25)

    @property
    def deaf_after(self) -> float:
        """Seconds of silence between two servers after which their connection counts as broken."""
        return 2 * self.timeout

    @classmethod
    def of(
        cls, named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer, workers: int, **options: Any
    ) -> "Specification":
        """Return the specification for an optimizer in its present state.

        Args:
            named_parameters: The trained parameters by name, as ``network.named_parameters()`` returns them; parameters
                that the optimizer does not hold are left out.
            optimizer: The user's optimizer.
            workers: Number of workers that the first step waits for.
            options: Further attributes.

        Raises:
            ConfigurationError: An option of the optimizer cannot be sent, a parameter has no name, or an attribute is
                out of range.
        """
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        named = [(name, parameter) for name, parameter in named_parameters if id(parameter) in held]
        index = {id(parameter): number for number, (_, parameter) in enumerate(named)}
        groups = []
        for group, group_options in zip(optimizer.param_groups, hyperparameters(optimizer), strict=True):
            for parameter in group["params"]:
                if id(parameter) not in index:
                    raise ConfigurationError(
                        f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not one of the "
                        "named parameters: make it part of the network"
                    )
            groups.append(Group(tuple(index[id(parameter)] for parameter in group["params"]), group_options))
        kind = type(optimizer)
        infos = tuple(ParameterInfo(name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in named)
        return cls(infos, f"{kind.__module__}.{kind.__qualname__}", tuple(groups), workers, **options)

    def to_json(self) -> str:
        """Return this specification as text for :meth:`from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Specification":
        """Return the specification that :meth:`to_json` wrote.

        Raises:
            ConfigurationError: A field is unknown or out of range.
        """
        values = json.loads(text)
        unknown = set(values) - {entry.name for entry in fields(cls)}
        if unknown:
            raise ConfigurationError(f"unknown entries in the specification: {sorted(unknown)}: remove them")
        values["parameters"] = tuple(
            ParameterInfo(p["name"], tuple(p["shape"]), p["dtype"]) for p in values["parameters"]
        )
        values["groups"] = tuple(Group(tuple(g["parameters"]), g["options"]) for g in values["groups"])
        return cls(**values)

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        yield from too_small(self, {"workers": 1, "per_node": 1, "servers": 1, "slice_bytes": 64})
        if self.replication > self.servers:
            yield f"replication={self.replication} needs as many servers, but servers={self.servers}: change one"
        if self.pipelined and (self.mode != "sync" or self.clip_norm is not None):
            yield (
                "pipelined=True is for mode='sync' without clip_norm, because otherwise a step depends on all slices: "
                "leave it out"
            )
        if self.pipelined and may_be_lossy(self.pull_compression):
            yield (
                f"pipelined=True with pull_compression={self.pull_compression!r}: a push asks for what is the same in "
                "all steps; use pull_compression='fp16', or leave it out"
            )
        if self.mode == "local" and (self.clip_norm is not None or self.clip_value is not None):
            yield "mode='local' pushes no gradients: clip them in the worker's own optimizer step"
        if self.clip_norm is not None and self.clip_value is not None:
            yield f"clip_norm={self.clip_norm} and clip_value={self.clip_value}: give one of them"
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                yield f"{name}={value}: use a positive number, or None for no clipping"
        for parameter in self.parameters:
            if parameter.dtype not in DTYPES:
                yield f"parameter {parameter.name} is {parameter.dtype}: the servers hold {', '.join(DTYPES)}"
        listed = sorted(index for group in self.groups for index in group.parameters)
        if listed != list(range(len(self.parameters))):
            yield "every parameter must be in exactly one parameter group of the optimizer"


def unknown_choices(options: object, choices: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each option that does not have one of its allowed values."""
    for name, choice in choices.items():
        if getattr(options, name) not in get_args(choice):
            yield f"{name}={getattr(options, name)!r}: use one of {', '.join(get_args(choice))}"


def too_small(options: object, least: Mapping[str, int]) -> Iterator[str]:
    """Yield a message for each number that is below its least value."""
    for name, value in least.items():
        if getattr(options, name) < value:
            yield f"{name}={getattr(options, name)}: use at least {value}"


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group as values that JSON can hold: learning rate, momentum and so on.

    Raises:
        ConfigurationError: An option is not a number, a text, None or a list of these.
    """
    return [
        {name: _plain(name, value) for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(name, entry) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigurationError(
        f"the optimizer's option {name}={value!r} cannot be sent to the servers: use numbers, text or lists of them"
    )


LARGEST_OPTION = 1e30


def check_options(options: Any, groups: Sequence[Group]) -> Options:
    """Return the hyper-parameters in a message, after a check that they have the form of the groups' options.

    Raises:
        InvalidMessageError: They do not.
    """
    if not _can_replace(options, [group.options for group in groups]):
        raise InvalidMessageError("hyper-parameters of other parameter groups")
    checked: Options = options
    return checked


def check_before_sending(options: Sequence[Mapping[str, Any]], groups: Sequence[Group], step: int) -> None:
    """Check a worker's hyper-parameters in a step: servers would drop wrong ones, and the step would never end.

    Raises:
        ConfigurationError: An option cannot replace its value at the start of the run; the message names the option.
    """
    for number, (values, group) in enumerate(zip(options, groups, strict=True)):
        for name, first in group.options.items():
            option = list(values[name]) if isinstance(values[name], tuple) else values[name]
            if not _can_replace(option, first):
                raise ConfigurationError(
                    f"step {step}: {name}={values[name]} of parameter group {number} was {first} at the start, and the "
                    "servers accept only finite numbers in its place: check its schedule, or do not change it"
                )


def _can_replace(value: Any, first: Any) -> bool:
    """Whether an option may replace its first value: numbers for numbers, and lists and objects of the same size."""
    if isinstance(first, dict):
        if not isinstance(value, dict) or value.keys() != first.keys():
            return False
        return all(_can_replace(value[name], first[name]) for name in first)
    if isinstance(first, list | tuple):
        return isinstance(value, list) and len(value) == len(first) and all(map(_can_replace, value, first))
    if isinstance(first, bool | str) or first is None:
        return bool(value == first)
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_OPTION
