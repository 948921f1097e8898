"""What workers and servers of one run agree on, as JSON."""

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

Options = list[dict[str, Any]]  # of each parameter group
Mode = Literal["sync", "async", "ssp", "local"]
if TYPE_CHECKING:
    PushCompression = str
    PullCompression = str
else:  # The command line's help lists these names, and its parser refuses others.
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
    """What a user asks of workers and servers, whatever they train.

    Attributes:
        mode: ``sync``: one step on the mean gradient of all workers. ``async``: each gradient is applied as it
            comes. ``ssp``: as async, but no worker runs further ahead of the slowest than `staleness` steps.
            ``local``: workers make their own steps, and what they push is the difference to what they began with; the
            servers make the outer step on its mean.
        staleness: For ssp; 0 is sync.
        compression: How pushed gradients are encoded; ``auto``: workers measure and choose.
        topk_density: Share of a slice's elements that ``topk`` sends.
        pull_compression: How pulled parameters are encoded, or ``auto``; with ``topk`` and ``onebit`` the changes of
            each common step. The servers' own keep their precision.
        replication: Servers that hold each slice.
        timeout: Seconds of silence after which a worker gives up a server.
        max_joiners: Workers that may join beside these.

    Raises:
        ConfigurationError: They contradict each other or are out of range.
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
        for wrong in self._mistakes():
            raise ConfigurationError(wrong)

    @property
    def aggregates(self) -> bool:
        """Whether a step waits for all workers: sync, local, and ssp that allows no staleness."""
        return self.mode in ("sync", "local") or (self.mode == "ssp" and self.staleness == 0)

    @property
    def pulls_changes(self) -> bool:
        """Whether workers pull compressed changes of the parameters and not the parameters, or may, with ``auto``."""
        if self.pull_compression == AUTO:
            return self.aggregates
        return may_be_lossy(self.pull_compression)

    def _mistakes(self) -> Iterator[str]:
        """Each that there is, with the remedy."""
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
    """What workers and servers of one run agree on; the same object everywhere.

    Attributes:
        parameters: The trained parameters, in the order of their first use as far as it is known.
        optimizer: Class path of the user's optimizer, such as ``torch.optim.sgd.SGD``; in mode ``local`` the
            outer one.
        groups: The optimizer's parameter groups.
        workers: Workers that the first step waits for.
        servers: Number of servers; their ids are 0 to `servers` - 1.
        pipelined: For sync: a slice's step is made as soon as its own pushes are there, and each push asks for its
            answer, so that values come while gradients leave. A worker that dies may be in a part of its last step.
        clip_norm: Largest global L2 norm of a gradient: of the mean gradient in sync, else of each worker's own.
        clip_value: Largest absolute value of a gradient's elements, likewise.
        slice_bytes: Largest slice of a parameter, except for optimizers that need whole tensors.
        session: Random number of this run: messages of another run are dropped.
        per_node: How many are one worker together, as those of a node that push as one.
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
        """Bytes of the parameters' largest data type."""
        return max((DTYPES[parameter.dtype].itemsize for parameter in self.parameters), default=1)

    @property
    def most_workers(self) -> int:
        """How many there may be at a time."""
        return self.workers + self.max_joiners

    @property
    def patience(self) -> float:
        """Seconds of silence after which a worker gives up a server.

        The coordinator speaks before: after the time-out it knows who has died, or is silent itself. One with copies is
        out of the view some time after that.
        """
        return self.timeout * (2 if self.replication > 1 else 1.25)

    @property
    def deaf_after(self) -> float:
        """Seconds of silence between two servers after which the connection is at fault."""
        return 2 * self.timeout

    @classmethod
    def of(
        cls, named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer, workers: int, **options: Any
    ) -> "Specification":
        """The specification for an optimizer as it is now.

        Args:
            named_parameters: The trained parameters by name, as ``network.named_parameters()`` gives them; those that
                the optimizer does not hold are left out.
            optimizer: The user's optimizer.
            workers: Workers that the first step waits for.
            options: Further attributes.

        Raises:
            ConfigurationError: An option of the optimizer cannot travel, a parameter has no name, or an attribute is
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
        """This specification as text for :meth:`from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Specification":
        """The specification that :meth:`to_json` wrote.

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
                "pipelined=True is for mode='sync' without clip_norm: else something of all slices decides each step; "
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
    """Mistakes of options that are one of several words."""
    for name, choice in choices.items():
        if getattr(options, name) not in get_args(choice):
            yield f"{name}={getattr(options, name)!r}: use one of {', '.join(get_args(choice))}"


def too_small(options: object, least: Mapping[str, int]) -> Iterator[str]:
    """Mistakes of options that are numbers."""
    for name, value in least.items():
        if getattr(options, name) < value:
            yield f"{name}={getattr(options, name)}: use at least {value}"


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group as what JSON can hold: learning rate, momentum and so on.

    Raises:
        ConfigurationError: An option is neither a number, text, None nor a list of those.
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
    """The hyper-parameters of each parameter group that a message brings, if they are of the groups' form."""
    if not _alike(options, [group.options for group in groups]):
        raise InvalidMessageError("hyper-parameters of other parameter groups")
    checked: Options = options
    return checked


def check_before_sending(options: Sequence[Mapping[str, Any]], groups: Sequence[Group], step: int) -> None:
    """Refuse at its worker, in a step, what the servers would drop: the step would never end.

    Raises:
        ConfigurationError: An option cannot replace that of the start of the run; it is named.
    """
    for number, (given, group) in enumerate(zip(options, groups, strict=True)):
        for name, first in group.options.items():
            option = list(given[name]) if isinstance(given[name], tuple) else given[name]
            if not _alike(option, first):
                raise ConfigurationError(
                    f"step {step}: {name}={given[name]} of parameter group {number} was {first} at the start, and the "
                    "servers take only other finite numbers: look at its schedule, or leave it as it was"
                )


def _alike(value: Any, given: Any) -> bool:
    """Whether an option may replace another: numbers for numbers, and lists and objects of the same size."""
    if isinstance(given, dict):
        return (
            isinstance(value, dict) and value.keys() == given.keys() and all(_alike(value[k], given[k]) for k in given)
        )
    if isinstance(given, list | tuple):
        return isinstance(value, list) and len(value) == len(given) and all(map(_alike, value, given))
    if isinstance(given, bool | str) or given is None:
        return bool(value == given)
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_OPTION
