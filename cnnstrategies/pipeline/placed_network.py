"""Call a divided network as on one device: on every rank, once, with a whole batch."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

from torch import Tensor, nn

from cnnstrategies._torch_private import without_functions
from cnnstrategies.pipeline.batch_rows import BatchRows
from cnnstrategies.pipeline.buffers import leave_statistics
from cnnstrategies.pipeline.declared_loss import DeclaredLoss
from cnnstrategies.pipeline.division import Division
from cnnstrategies.pipeline.interleaved_batch import Interleaving
from cnnstrategies.pipeline.known_forms import KnownForm, form_of
from cnnstrategies.pipeline.network_copies import CopiedForward, pickled_forward
from cnnstrategies.pipeline.noted_contents import NotedContents
from cnnstrategies.pipeline.placed_call import PlacedCall
from cnnstrategies.pipeline.replicas import StageReplicas
from cnnstrategies.pipeline.stage_runner import StageRunner
from cnnstrategies.pipeline.storing_code import forget_verdicts, has_users_hook
from cnnstrategies.pipeline.term_reports import NeedsOneMicrobatchError
from cnnstrategies.pipeline.timetable import Checkpointing
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.pipeline.whole_batch import CallArguments, WholeBatch
from cnnstrategies.placed import Places
from cnnstrategies.placed.placing import place_tensors


class PlacedNetwork:
    """A divided network whose values have places: the parameters and buffers, the outputs, and all gradients.

    All ranks run the same program. In a call, each rank runs its microbatches in its stage. All replicas of the last
    stage get the network's result for the whole batch; other ranks get foreign tensors. For autograd a call is one
    function of the images and the parameters, so gradients reach the images and whatever was computed before, and
    hooks of parameters see the gradient of the whole batch.

    Parameters and buffers of other stages become foreign tensors in place, and those of this rank's stage are marked.
    Copies of the network that were made before need the same, see :func:`.network_copies.adopt_copies`. A copy by
    ``copy.deepcopy`` runs as a divided network, too, if the attribute ``forward`` of the network is this object.

    Args:
        network: The network. All ranks have the same values.
        cuts: See :class:`~cnnstrategies.pipeline.division.Division`.
        places: The rules of this rank.
        transport: Connections of this rank, for activations and their gradients.
        ahead: See `StageRunner`.
        owner: The module that contains the network, in which forwards may store values; by default the network.
        check: Function that may refuse the division, while the parameters of all stages have values.

    Attributes:
        division: The division of the network.
        places: The rules of this rank.
        runner: The stage of this rank.
        ranks: For each stage, the ranks of its replicas.
        forms: What all ranks know about earlier calls, by the form of the batch; see :meth:`form_of`.
        copies: Copies of the network whose attribute ``forward`` divides them, or has divided them.
        one_microbatch: Why the network runs batches as one microbatch; None if it does not.
        declared: The loss that the module declares, which allows the order 1F1B; None if the order is always GPipe's.
        window_ends: Whether the optimizer makes a step after the backward of the current training step.
        calls: Number of calls with gradients in the current training step.
        summed: Parameters, and the state of their gradients' sums over the replicas; see `call_sums`.
    """

    window_ends = False
    calls = 0

    def __init__(
        self,
        network: nn.Module,
        cuts: Sequence[str | int],
        places: Places,
        transport: Transport,
        ahead: int,
        owner: nn.Module | None = None,
        check: Callable[[Division], None] | None = None,
    ) -> None:
        self.places = places
        self.copies: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        division = Division(network, cuts)
        if check is not None:
            check(division)
        self._begin(division, transport, ahead, network if owner is None else owner)

    def _begin(
        self,
        division: Division,
        transport: Transport,
        ahead: int,
        owner: nn.Module,
        replicas: StageReplicas | None = None,
    ) -> None:
        network = division.network
        self.division = division
        self.runner = StageRunner(division, transport, ahead, replicas)
        self.forms: dict[Hashable, KnownForm] = {}
        self._numbers: dict[Hashable, int] = {}
        self._modules = tuple(network.modules())
        self._graphs = self.division.graphs()
        self.ranks = [tuple(sorted(transport.placement.ranks(stage))) for stage in range(self.division.stages)]
        modules = dict(network.named_modules())
        paths = [(name, *name.rpartition(".")[::2]) for name, _ in network.named_buffers()]
        of_stage = [path for path in paths if division.owner[path[0]] == self.runner.stage]
        self._buffers = [(name, modules[path], key) for name, path, key in of_stage]
        self._placed_buffers: NotedContents | None = None
        self.place_state(network)
        self.places.sums.watch(self.runner)
        self._owner = owner if any(module is network for module in owner.modules()) else network
        self.runner.watch(self._owner, self.places, self.ranks)
        self.one_microbatch: str | None = None
        self.declared: DeclaredLoss | None = None
        self.summed: list[tuple[nn.Parameter, tuple[int, int]]] = []
        self._whole: set[Hashable] = set()  # Forms of batches that run as one microbatch.

    def place_state(self, network: nn.Module) -> None:
        """Mark the parameters and buffers of this rank's stage, and make those of other stages foreign.

        All ranks must call this.

        Args:
            network: The network, or a copy of the network.

        Raises:
            ConfigurationError: A parameter or buffer cannot become foreign; see `place_tensors`.
        """
        tensors = [(name, self.ranks[stage], tensor) for name, stage, tensor in self.division.tensors(network)]
        place_tensors(self.places, network, tensors)

    def for_copy(self, network: nn.Module) -> Self:
        """Return a copy of the network as a divided network, with the same stages. All ranks must call this."""
        copied = object.__new__(type(self))
        copied.places, copied.copies = self.places, self.copies
        with self.places.local():
            copied._begin(
                self.division.for_copy(network),
                self.runner.transport,
                self.runner.ahead,
                self._owner,
                self.runner.replicas,  # A process group cannot be created during a step.
            )
        copied.runner.microbatches, copied.runner.usual = self.runner.microbatches, self.runner.usual
        copied.runner.activation_checkpointing = self.runner.activation_checkpointing
        copied.runner.run_ahead = self.runner.run_ahead
        copied.runner.times = self.runner.times
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the attribute ``forward`` of a copy of the network."""

        def install(placed: "PlacedNetwork") -> None:
            vars(placed.division.network)["forward"] = placed

        return CopiedForward(self, memo.get(id(self.division.network)), install)

    def __reduce__(self) -> Any:
        """Pickle the network's own ``forward``."""
        return pickled_forward(self.division.network)

    def form_of(self, images: Any, parameters: Sequence[nn.Parameter]) -> Hashable:
        """Return a key that is equal for batches of the same form. All ranks compute equal keys.

        Args:
            images: The images.
            parameters: All parameters of the network.
        """
        graphs = self.division.graphs()
        if graphs is not self._graphs:
            # The state of an opened container has changed, on all ranks.
            self._graphs = graphs
            self.forms.clear()
        form = form_of(images, self._modules, parameters, self.runner.transport.device.type)
        # The form of a network has hundreds of numbers, and each look into a dictionary would hash them.
        return self._numbers.setdefault(form, len(self._numbers))

    def may_read_gradients(self) -> bool:
        """Whether code inside of the network, such as a hook of a module, may read gradients of parameters."""
        return any(has_users_hook(module) or "grad" in _names_in(type(module).forward) for module in self._modules)

    def begin(self, call: CallArguments, interleaving: Interleaving | None) -> WholeBatch:
        """Run the forwards of this rank's stage, in one microbatch if a stage needs the whole batch.

        The arguments are those of `StageRunner.begin`.
        """
        if call.form not in self._whole:
            try:
                return self.runner.begin(call, interleaving)
            except NeedsOneMicrobatchError as error:
                if not error.is_once:
                    self._whole.add(call.form)
                    self._leave_statistics(error.reason)
                    self.one_microbatch = (
                        f"{error.reason}, so the network runs batches as one microbatch, and only one of its "
                        f"{self.division.stages} stages computes at a time"
                    )
        return self.runner.begin(call._replace(checkpointing=None), whole=True)

    def _leave_statistics(self, reason: str) -> None:
        """Run BatchNorm layers that are called several times as other layers, if this is the reason to do so."""
        if names := leave_statistics(self.division.network, reason):
            self.runner.buffers.leave(names)
            forget_verdicts()

    def __call__(self, images: Any) -> Any:
        """Return the network's result for a batch. All ranks must call this.

        Args:
            images: Nested containers of tensors with one row per sample.
        """
        parameters, names = self.division.parameters(), self.division.used
        form = self.form_of(images, [parameter for *_, parameter in parameters])
        with without_functions():  # A mode would intercept each access to an attribute of a tensor.
            used = {name: tensor for name, _, tensor in parameters if tensor.requires_grad and name in names}
        call = PlacedCall(self, images, used, form)
        tensors = call.run()
        self._place_new_buffers()
        count = len(call.header.tensors)
        call.place_stored(tensors[count:])
        call.observe_loss(tensors[:count])
        return call.header.unpack(tensors[:count])[0]

    @property
    def other_checkpointing(self) -> Checkpointing | None:
        """Which forwards run again in GPipe's order, if later calls are expected to run in the order 1F1B.

        None if the calls run as :attr:`StageRunner.activation_checkpointing` says.
        """
        return "always" if self.declared is not None and self.declared.saves_memory else None

    def can_interleave(self, form: Hashable, samples: int) -> bool:
        """Whether batches of a form can run in the order 1F1B. It needs several microbatches, and an earlier batch."""
        runner = self.runner
        rows = BatchRows.of(samples, runner.placement, runner.microbatches, runner.usual)
        return form in self.forms and form not in self._whole and not rows.is_one_microbatch

    def _place_new_buffers(self) -> None:
        """Mark buffers that a forward has put in the place of others."""
        if self._placed_buffers is not None and self._placed_buffers.hold:
            return
        for name, module, key in self._buffers:
            buffer = getattr(module, key, None)
            if isinstance(buffer, Tensor) and self.places.place_of(buffer) is None:
                self.places.mark(buffer, self.ranks[self.runner.stage], name)
        self._placed_buffers = NotedContents(vars(module)["_buffers"] for _, module, _ in self._buffers)


def _names_in(function: Any) -> tuple[str, ...]:
    """Return the names of attributes and global variables in a function's code."""
    code = getattr(function, "__code__", None)
    return () if code is None else code.co_names
