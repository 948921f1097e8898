"""Costs of a network whose images are divided over several devices, as the planner needs them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PartCosts:
    """Messages and memory of a training step in which each image is divided over ``parts`` devices.

    Sizes are those of a batch of one sample, and grow with the batch, except where an attribute says otherwise.

    Attributes:
        parts: Number of parts of an image.
        shares: For each part, its share of the tensors that autograd keeps. It includes the uneven division of sizes
            that are not a multiple of the number of parts, and is also used as the share of the computing time.
        sent_bytes: For each part, bytes of rows that its device sends to other devices.
        busiest_bytes: Largest number of bytes of rows that a device sends or receives.
        early_bytes: Bytes of `busiest_bytes` that are on their way while a convolution computes inner rows.
        exchanges: Number of times that the devices exchange rows, whatever the batch.
        summed_bytes: Bytes of sums over the parts for which the devices wait, such as statistics. They do not depend on
            the batch.
        sums: Number of these sums, whatever the batch.
        gradient_bytes: Bytes of gradients of parameters that are summed while the backward goes on.
        window_bytes: Bytes of the largest copy of a part's rows together with rows of its neighbours.
        seconds: Seconds that the rules for divided operations take on the host, whatever the batch; 0 on accelerators,
            which compute meanwhile.
        gathers: Operations that need all rows on all devices, each with its line of the program.
    """

    parts: int
    shares: tuple[float, ...]
    sent_bytes: tuple[float, ...]
    busiest_bytes: float
    early_bytes: float
    exchanges: int
    summed_bytes: int
    sums: int
    gradient_bytes: int
    window_bytes: float
    seconds: float
    gathers: tuple[str, ...] = ()
