"""How a pipeline's results enter Lightning's training step."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.optim import Optimizer

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.stage import StageModule
from cnnstrategies.pipeline.tracing import network_inputs
from cnnstrategies.strategies.hybrid_pipeline.images import ImagesElsewhere
from cnnstrategies.strategies.hybrid_pipeline.layers import Layers
from cnnstrategies.strategies.hybrid_pipeline.network_call import one_of


class HandOver(torch.autograd.Function):
    """A loss whose backward gives the parameters gradients that are already known.

    So Lightning's own backward, with its accumulation, loss scale and hooks, runs as ever.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: Sequence[Tensor | None], scale: float | Tensor, *parameters: nn.Parameter
    ) -> Tensor:
        """Return the loss.

        Args:
            ctx: Keeps the gradients.
            loss: The mean loss.
            gradients: Gradient of ``scale`` times the loss for each parameter; they are used up.
            scale: The factor that is already in them.
            parameters: The parameters.
        """
        ctx.gradients = gradients
        ctx.scale = scale
        return loss.detach().clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grad_outputs: Any) -> Any:
        """The gradients, times what Lightning did to the loss."""
        factor = grad_outputs[0] / ctx.scale  # type: ignore[attr-defined]
        gradients = ctx.gradients  # type: ignore[attr-defined]
        ctx.gradients = None  # type: ignore[attr-defined]
        return None, None, None, *(None if g is None else g.mul_(factor.to(g.dtype)) for g in gradients)


def hand_over(
    loss: Tensor, gradients: Sequence[Tensor | None], scale: float | Tensor, parameters: Sequence[nn.Parameter]
) -> Tensor:
    """The loss that Lightning goes backward from: see :class:`HandOver`; a stage that is frozen has nothing to get."""
    if not parameters:
        return loss.detach().clone().requires_grad_()
    result: Tensor = HandOver.apply(loss, gradients, scale, *parameters)
    return result


class NetworkStandIn(Layers):
    """Takes the place of a LightningModule's network: this rank's part, under the network's parameter names.

    Called with images it returns the outputs that the pipeline has computed for the batch.

    Args:
        stage: This rank's stage; its modules, parameters and buffers are shared.
        path: What the module calls the network.
        network: The whole network.
    """

    def __init__(self, stage: StageModule, path: str, network: nn.Module) -> None:
        super().__init__(path, network, stage)
        self._path = path or "forward"
        self._inputs = network_inputs(network)
        self._signature = inspect.signature(network.forward)
        self.training = stage.training
        self._outputs: list[Any] = []
        self._computed: list[tuple[int, ...]] | None = None
        self._called: Callable[[], None] = _nothing

    def put(
        self, outputs: Any, computed: list[tuple[int, ...]] | None = None, called: Callable[[], None] | None = None
    ) -> None:
        """Hand over the outputs of the batch that the next step gets.

        Args:
            outputs: The outputs.
            computed: Where the step computes the network's inputs, the shape of a row of each.
            called: Is called when the step calls the network.
        """
        self._outputs = [outputs]
        self._computed = computed
        self._called = called or _nothing

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network's outputs for the batch of this step.

        Raises:
            ConfigurationError: It is called with something else than the images of the batch, a second time in a step,
                or outside of one.
        """
        if not self._outputs:
            raise ConfigurationError(
                f"self.{self._path} was called twice in a step, or outside of a step: its stages run once for each "
                f"batch; make one call of it with several inputs, such as self.{self._path}(left, right) for a network "
                "whose forward takes both, in training_step, validation_step, test_step and predict_step alone"
            )
        given = self._signature.bind(*args, **kwargs).arguments
        for number, name in enumerate(self._inputs):
            images = one_of(given.pop(name))
            if not isinstance(images, ImagesElsewhere):
                raise ConfigurationError(
                    f"the network is called with {_described(images)} that is not the images of the batch, nor "
                    "computed from them with torch: in a pipeline the first stage alone has them; change them in the "
                    "network's forward, in the dataset, or in on_after_batch_transfer, which runs where they are"
                )
            if self._computed is not None:
                if images.shape[1:] != self._computed[number]:
                    raise ConfigurationError(
                        f"the step gives the network {_described(images)} as {name!r}, and where the images are its "
                        f"rows have the shape {self._computed[number]}: compute it in the same way in each step"
                    )
            elif images.number != number:
                raise ConfigurationError(
                    f"the network is called with another tensor of the batch as {name!r} than in the first step: in a "
                    "pipeline it gets the same one in each"
                )
        for name, value in given.items():
            default = self._signature.parameters[name].default
            if value is not default and (isinstance(value, Tensor) or value != default):
                raise ConfigurationError(
                    f"self.{self._path} is called with {name}={_described(value)} besides the images: a network that "
                    "is cut into stages has its options from the beginning; set it in its __init__, or leave out the "
                    f"default of {name!r} if it is a tensor of the batch"
                )
        self._called()
        return self._outputs.pop()


def _nothing() -> None:
    pass


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else f"a {type(value).__name__}"


def clip_by_joint_norm(optimizer: Optimizer, clip_val: int | float, counts: bool, device: torch.device) -> None:
    """Clip this stage's gradients by the norm over those of all stages; a collective.

    Args:
        optimizer: Holds this stage's parameters.
        clip_val: The largest norm.
        counts: Whether this rank's gradients count: those of one replica of each stage do.
        device: Where the ranks add up.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if counts and parameters:
        squares = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).double() ** 2
    dist.all_reduce(squares)
    if parameters:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, squares.sqrt().to(parameters[0].dtype))
