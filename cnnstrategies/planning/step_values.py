"""Values that a training step's own code sends between the stages of a pipeline, besides the network's activations."""

from dataclasses import dataclass

from cnnstrategies.planning.cluster import Cluster


@dataclass(frozen=True)
class StepValues:
    """Bytes of these values in a step, for the whole batch.

    Attributes:
        loaded: Tensors of the batch that operations read on the last stage, such as the masks of a segmentation. They
            are sent together with the batch.
        derived: Other tensors that operations bring from the first stage to the last, such as weights that are computed
            from masks.
        returned: Tensors that operations bring from the last stage to the first.
        shared: Tensors that all ranks get: small tensors of the batch, and arguments of metrics.
        joined: Tensors of the first stage of which its replicas have loaded some rows each, and send them to each other
            because an operation needs all rows.
        unknown: Reason why the bytes are not known; empty if they are.
    """

    loaded: int = 0
    derived: int = 0
    returned: int = 0
    shared: int = 0
    joined: int = 0
    unknown: str = ""

    def sent_bytes(self, replicas: tuple[int, ...]) -> int:
        """Return the bytes that all ranks of a pipeline together send in a step.

        Args:
            replicas: Number of replicas of each stage.
        """
        return sum(self._messages(replicas))

    def seconds(self, cluster: Cluster, replicas: tuple[int, ...]) -> float:
        """Return the seconds of the transfers, which no other work of the step hides.

        Args:
            cluster: The cluster.
            replicas: Number of replicas of each stage.
        """
        ranks = sum(replicas)
        if ranks == 1:
            return 0.0
        link = cluster.link(0, ranks - 1)
        return sum(map(link.time, self._messages(replicas)))

    def _messages(self, replicas: tuple[int, ...]) -> list[int]:
        """Return the bytes of each kind of message, which one rank sends to one rank after the other."""
        first, last = replicas[0], replicas[-1] if len(replicas) > 1 else 0
        return [
            # The replicas of the first stage load parts of the batch, and send each other the rows that others read.
            self.loaded * (last + first - 1 if last else 0),
            self.derived * last,
            self.returned * first if last else 0,
            self.shared * (sum(replicas) - 1),
            self.joined * (first - 1),
        ]


NO_VALUES = StepValues()
