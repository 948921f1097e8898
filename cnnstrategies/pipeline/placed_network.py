"""Call a divided network as on one device: on every rank, once, with a whole batch."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies.pipeline.channels import TensorHeader, pack
from cnnstrategies.pipeline.division import Division
from cnnstrategies.pipeline.stored_terms import NeedsOneMicrobatchError
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.pipeline.untouched import random_states, restore_random
from cnnstrategies.pipeline.whole_batch import StageRunner, WholeBatch
from cnnstrategies.placed import Places


class PlacedNetwork:
    """A divided network whose values have places: the parameters and buffers, the outputs, and all gradients.

    All ranks run the same program. A call runs this rank's stage for all microbatches. Its result, the network's
    result for the whole batch, is in the last stage; the other ranks get foreign tensors. For autograd a call is one
    function of the images and the parameters, so gradients reach the images and whatever was computed before, and
    hooks of parameters see the gradient of the whole batch.

    Parameters and buffers of other stages become foreign tensors in place, and those of this rank's stage are marked.
    Copies of the network that were made before need the same, see :meth:`place_state`.

    Args:
        network: The network. All ranks have the same values.
        cuts: See :class:`~cnnstrategies.pipeline.division.Division`.
        places: The rules of this rank.
        transport: Connections of this rank, for activations and their gradients. Each stage has one replica.
        ahead: See `StageRunner`.
        owner: The module that contains the network, in which forwards may store values; by default the network.

    Attributes:
        one_microbatch: Why the network runs each batch as one microbatch; None if it does not.
    """

    def __init__(
        self,
        network: nn.Module,
        cuts: Sequence[str | int],
        places: Places,
        transport: Transport,
        ahead: int,
        owner: nn.Module | None = None,
    ) -> None:
        self.division = Division(network, cuts)
        self.places = places
        self.runner = StageRunner(self.division, transport, ahead)
        self.ranks = [tuple(transport.placement.ranks(stage)) for stage in range(self.division.stages)]
        self.place_state(network)
        self.runner.watch(network if owner is None else owner, places, self.ranks)
        self.one_microbatch: str | None = None
        # Modes of the modules, and whether autograd is on, in which the network runs a batch as one microbatch.
        self._whole: set[Hashable] = set()

    def place_state(self, network: nn.Module) -> None:
        """Mark the parameters and buffers of this rank's stage, and make those of other stages foreign.

        Args:
            network: The network, or a copy of the network.
        """
        for name, stage, tensor in list(self.division.tensors(network)):
            if stage == self.runner.stage:
                self.places.mark(tensor, self.ranks[stage], name)
            else:
                self.places.put_away(tensor, self.ranks[stage], name)

    def __call__(self, images: Any) -> Any:
        """Return the network's result for a batch. All ranks must call this.

        Args:
            images: Nested containers of tensors with one row per sample.
        """
        names, parameters = [], []
        for name, parameter in self.division.network.named_parameters():
            if parameter.requires_grad and name in self.division.used:
                names.append(name)
                parameters.append(parameter)
        call = _Call(self, images, names)
        tensors = _NetworkFunction.apply(call, *_tensors(images), *parameters)
        assert call.header is not None
        assert call.batch is not None
        assert call.batch.terms is not None
        count = len(call.header.tensors)
        call.batch.terms.place(tensors[count:])
        return call.header.unpack(tensors[:count])[0]

    def begin(self, images: Any, samples: int, needs_gradient: bool) -> WholeBatch:
        """Run the forwards of this rank's stage, for one microbatch if a stage needs the whole batch.

        Args:
            images: See `StageRunner.begin`, like the other arguments.
            samples: Number of samples.
            needs_gradient: Whether a backward follows.
        """
        training = [module.training for module in self.division.network.modules()]
        mode = (needs_gradient, *training)
        random = random_states()
        if mode not in self._whole:
            try:
                return self.runner.begin(images, samples, needs_gradient)
            except NeedsOneMicrobatchError as error:
                stages = self.division.stages
                self.one_microbatch = (
                    f"{error.reason}, so the network runs each batch as one microbatch, and only one of its {stages} "
                    "stages computes at a time"
                )
                self._whole.add(mode)
        restore_random(random)
        return self.runner.begin(images, samples, needs_gradient, whole=True)


class _Call:
    """One call of a network: its arguments, and what its backward needs."""

    def __init__(self, network: PlacedNetwork, images: Any, names: Sequence[str]) -> None:
        self.network, self.images, self.names = network, images, names
        self.places = network.places
        self.first, self.last = network.ranks[0], network.ranks[-1]
        self.needs_gradient = torch.is_grad_enabled()
        self.header: TensorHeader | None = None
        self.batch: WholeBatch | None = None

    def forward(self) -> tuple[Tensor, ...]:
        """Run the forwards, and return the tensors of the network's result."""
        places, leaves = self.places, _tensors(self.images)
        brought = places.bring_all(leaves, self.first, "images")
        with places.local():
            for leaf in leaves:
                if id(leaf) in brought:
                    brought[id(leaf)].requires_grad_(leaf.requires_grad)
            images = tree_map(lambda leaf: brought.get(id(leaf), leaf), self.images)
            self.batch = self.network.begin(images, len(leaves[0]), self.needs_gradient)
            header, tensors = pack((self.batch.outputs,), ask_for_all=False)
        self.header = places.tell(self.last, lambda: header, "outputs")
        assert self.header is not None
        assert self.batch.terms is not None
        if self.network.runner.last:
            places.mark(tensors, self.last, "the network's output")
        else:
            with places.local():
                device = self.network.runner.transport.device
                shapes = [spec.empty(torch.device("meta")) for spec in self.header.tensors]
                tensors = [places.foreign_like(like, self.last, "the network's output", device) for like in shapes]
        return *tensors, *self.batch.terms.outputs()

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backwards, and return the gradients of the images' tensors and of the parameters."""
        places, runner = self.places, self.network.runner
        assert self.batch is not None
        assert self.header is not None
        assert self.batch.terms is not None
        count = len(self.header.tensors)
        of_stored = self.batch.terms.own_gradients(gradients[count:])
        gradients = gradients[:count]
        brought = places.bring_all([g for g in gradients if g is not None], self.last, "gradients of outputs")
        of_outputs = [gradient if gradient is None else brought.get(id(gradient), gradient) for gradient in gradients]
        with places.local():
            sums, of_images = self.batch.backward(of_outputs, of_stored)
            of_parameters = dict(zip((id(parameter) for parameter in runner.parameters), sums, strict=True))
        images = _tensors(self.images)
        by_name = dict(self.network.division.network.named_parameters())
        # Image gradients exist in the first stage only, in the order of the images. Parameters have names.
        computed: dict[int | str, Tensor | None] = dict(enumerate(of_images))
        computed |= {name: of_parameters.get(id(by_name[name])) for name in self.names}
        here = [key for key, gradient in computed.items() if gradient is not None]
        everywhere = {key for keys in places.exchange(here, range(places.world_size), "used") for key in keys}
        targets: list[tuple[int | str, tuple[int, ...], Tensor]]
        targets = [(index, self.first, image) for index, image in enumerate(images)]
        owner = self.network.division.owner
        targets += [(name, self.network.ranks[owner[name]], by_name[name]) for name in self.names]
        return [
            self._at(place, computed.get(key), tensor) if key in everywhere else None for key, place, tensor in targets
        ]

    def _at(self, place: tuple[int, ...], gradient: Tensor | None, like: Tensor) -> Tensor:
        """Return a gradient of a place: this rank's gradient, or a foreign tensor."""
        if self.places.rank in place:
            assert gradient is not None
            return self.places.mark(gradient, place)
        return self.places.foreign_like(like.detach(), place)


class _NetworkFunction(torch.autograd.Function):
    """A network as one function of the images and the parameters."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the forwards of this rank's stage."""
        ctx.set_materialize_grads(False)
        ctx.call = call
        return call.forward()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Run the backwards of this rank's stage."""
        return (None, *ctx.call.backward(gradients))


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
