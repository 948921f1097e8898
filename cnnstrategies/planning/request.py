"""What a plan is asked for, and what cannot be asked for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.planning.costs import GraphCosts

if TYPE_CHECKING:  # It imports torch, which a plan from a file does without.
    from cnnstrategies.pipeline.recompute import Checkpointing
    from cnnstrategies.pipeline.timetable import Order


@dataclass(frozen=True)
class Request:
    """What a plan is made for.

    Attributes:
        devices: Devices to use.
        microbatches: Microbatches of a step.
        schedule: Name of the schedule.
        stages: Number of stages; chosen when None.
        replicas: Replicas of each stage; chosen when None.
        cuts: First node of each stage but the first; chosen when None.
        memory_limit: Bytes that a device may hold; unlimited when None.
        activation_checkpointing: Whether a stage keeps only its inputs and runs its forward again before the
            backward: for no microbatch, for all but the last, or for all.
        run_ahead: Whether stages hold one microbatch more, so that messages travel while they compute; chosen when
            None: where it gains time and fits into memory.
        state_copies: Copies of the parameters that training holds: parameters, gradients, optimizer state.
        spares: Whether devices may be left out that gain little, where neither stages nor replicas are given.
        placement: How ranks are numbered; chosen when None.
    """

    devices: int
    microbatches: int
    schedule: str = "1f1b"
    stages: int | None = None
    replicas: tuple[int, ...] | None = None
    cuts: tuple[int, ...] | None = None
    memory_limit: int | None = None
    activation_checkpointing: "Checkpointing" = "never"
    run_ahead: bool | None = None
    state_copies: int = 3
    spares: bool = True
    placement: "Order | None" = None


def check_request(costs: GraphCosts, request: Request) -> None:
    """Refuse a request that no layout fulfils.

    Raises:
        ConfigurationError: Stages, replicas, cuts and devices do not add up, there are fewer places to cut than
            cuts, or fewer microbatches than replicas of a stage.
    """
    stages = request.stages
    for name, given in (("replicas", request.replicas), ("cuts", request.cuts)):
        if given is not None:
            count = len(given) + (name == "cuts")
            if stages is not None and stages != count:
                raise ConfigurationError(f"{name} makes {count} stages, but stages={stages}: leave one of them out")
            stages = count
    if request.replicas is not None and sum(request.replicas) != request.devices:
        raise ConfigurationError(
            f"replicas={list(request.replicas)} need {sum(request.replicas)} devices, but there are "
            f"{request.devices}: change replicas or the number of devices"
        )
    if stages is not None and stages > min(request.devices, len(costs.cut_positions) + 1):
        raise ConfigurationError(
            f"stages={stages}: there are {request.devices} devices, and the network has {len(costs.cut_positions)} "
            f"places to cut; use at most {min(request.devices, len(costs.cut_positions) + 1)} stages"
        )
    if stages is not None and request.devices > stages * request.microbatches:
        raise ConfigurationError(
            f"microbatches={request.microbatches} keep at most {stages * request.microbatches} devices busy with "
            f"{stages} stages, but there are {request.devices}: use more microbatches or more stages"
        )
    if request.microbatches < max(request.replicas or (1,)):
        raise ConfigurationError(
            f"microbatches={request.microbatches} are fewer than the {max(request.replicas or ())} replicas of a "
            "stage, some of which would idle: use at least as many microbatches"
        )
