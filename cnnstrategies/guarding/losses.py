"""Search for losses that get probabilities in place of scores, in autograd's graph of a loss."""

from collections import deque
from typing import Any

from torch import Tensor

from cnnstrategies._torch_private import CLASS_LOSSES, COPIES, PROBABILITIES, SCORE_LOSSES

MOST = 1000  # Number of nodes nearest to the loss that are looked at.


def wrong_input(loss: object) -> tuple[str, str] | None:
    """Return what a part of a loss gets, and what to do; None if nothing is wrong.

    A further ``log_softmax`` before ``cross_entropy`` changes nothing, so it is not reported.

    Args:
        loss: The loss with its graph. Other objects are accepted, and have nothing wrong.
    """
    if type(loss) is not Tensor or loss.grad_fn is None:
        return None
    nodes, seen = deque([loss.grad_fn]), {loss.grad_fn}
    while nodes and len(seen) < MOST:
        node = nodes.popleft()
        following = [other for other, _ in node.next_functions if other is not None]
        source = _source(following[0]) if following else ""
        if node.name() in SCORE_LOSSES and source == PROBABILITIES[SCORE_LOSSES[node.name()]]:
            kind = SCORE_LOSSES[node.name()]
            return f"applies {kind} to the result of {kind}", f"give the loss the scores, without {kind}"
        if node.name() in CLASS_LOSSES and source == PROBABILITIES["softmax"]:
            return "is nll_loss of the result of softmax", "use log_softmax, or cross_entropy of the scores"
        nodes += [other for other in following if other not in seen]
        seen.update(following)
    return None


def _source(node: Any) -> str:
    """Return the name of the node that has computed a value, which may have been copied or reshaped since."""
    while node is not None and node.name() in COPIES:
        node = node.next_functions[0][0]
    return "" if node is None else str(node.name())
