"""What a step gets in the place of the images, which the first stage alone has."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from cnnstrategies._torch_private import writes
from cnnstrategies.errors import ConfigurationError

# What changes neither the images' values nor which of them there are.
_HARMLESS = frozenset({"to", "cpu", "cuda", "contiguous", "float", "double", "detach", "clone", "pin_memory"})
# What tells of their form alone, beside attributes such as shape and device.
_FORM = frozenset(
    {
        *("size", "dim", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous"),
        *("is_floating_point", "is_complex", "is_pinned", "get_device", "type", "__len__"),
    }
)
COMPILE_STAGES = (
    "strategy hybrid_pipeline cuts the network before it is compiled; leave out torch.compile, and have each stage "
    "compiled by the callback ComputeSettings(compile_backend='inductor'), or use strategy ddp"
)
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


class ImagesElsewhere(Tensor):
    """Tells the shape, type and device of the images of a batch; their values nobody gets from it.

    Where the step computes with the images before it calls the network, the first stage does that with the images
    themselves, and on every rank such a stand-in with others, of which the form alone is worked out. Where it does
    not, a stand-in refuses to be computed with.

    Attributes:
        number: Which of the network's inputs, or of the batch's parts, it stands for; None for what is computed.
        computes: Whether it may be computed with.
        form: A tensor without values, which shares its memory with other forms as the images do with their views.
    """

    number: int | None
    computes: bool
    form: Tensor

    @classmethod
    def like(
        cls,
        rows: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        number: int | None = 0,
        computes: bool = False,
    ) -> "ImagesElsewhere":
        """A stand-in for ``rows`` images of a shape (C, H, W)."""
        with torch.inference_mode(False):  # Else no change in place would be noted.
            form = torch.empty((rows, *shape), dtype=dtype, device="meta")
        return cls._of(form, device, number, computes)

    @classmethod
    def _of(cls, form: Tensor, device: torch.device, number: int | None, computes: bool) -> "ImagesElsewhere":
        # Who gets at the values all the same, by code that is not torch's, has no plausible ones.
        value = float("nan") if form.is_floating_point() else 0
        images = torch.full((), value, dtype=form.dtype, device=device).expand(form.shape).as_subclass(cls)
        images.number, images.computes, images.form = number, computes, form
        return images

    @property
    def is_as_loaded(self) -> bool:
        """Whether it is what it stands for, and neither computed nor changed in place."""
        return self.number is not None and writes(self.form) == 0

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"<images {tuple(self.shape)}, which the first stage has>"

    def __iter__(self) -> Iterator[Tensor]:
        """One image after the other."""
        return iter(self.unbind(0))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer what is asked of the images' form, compute with it, or refuse."""
        name = getattr(func, "__name__", str(func))
        kwargs = dict(kwargs or {})
        if name in _FORM | _HARMLESS or name == "__get__":
            result = super().__torch_function__(func, types, tuple(args), kwargs)  # type: ignore[no-untyped-call]
            if not isinstance(result, Tensor):
                return result
            source = args[0]
            if name in _HARMLESS and (source.computes or result.dtype == source.dtype):
                same = result.dtype == source.dtype
                form = source.form.clone() if name == "clone" else source.form.to(result.dtype)
                return cls._of(form, result.device, source.number if same else None, source.computes)
        every = tree_flatten((args, kwargs))[0]
        # What is changed in place by way of `data` would not be noted.
        if func == _DATA or not all(one.computes for one in every if isinstance(one, cls)):
            _refuse(name)
        return cls._computed(func, name, (tuple(args), kwargs))

    @classmethod
    def _computed(cls, func: Callable[..., Any], name: str, given: Any) -> Any:
        """The form of a result that depends on the images."""
        leaves, tree = tree_flatten(given)
        stand_ins = [leaf for leaf in leaves if isinstance(leaf, cls)]
        with torch.inference_mode(False), torch.no_grad():
            forms = [_form_of(leaf) for leaf in leaves]
            others = [form for leaf, form in zip(leaves, forms, strict=True) if _is_other(leaf)]
            before = [writes(form) for form in others]
            args, kwargs = tree_unflatten(forms, tree)
            try:
                result = func(*args, **kwargs)
            except Exception:
                _refuse(name)
        if [writes(form) for form in others] != before:
            _refuse(name)  # It would write what only the first stage knows into something that every rank has.

        def stands_for(leaf: Any) -> Any:
            if leaf is None:
                return None
            if not isinstance(leaf, Tensor):
                _refuse(name)
            changed = next((one for one in stand_ins if one.form is leaf), None)
            return changed if changed is not None else cls._of(leaf, stand_ins[0].device, None, True)

        return tree_map(stands_for, result)


def _form_of(leaf: Any) -> Any:
    if isinstance(leaf, ImagesElsewhere):
        return leaf.form
    if isinstance(leaf, Tensor):
        return torch.empty_like(leaf, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _is_other(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, ImagesElsewhere)


def _refuse(name: str) -> NoReturn:
    if torch.compiler.is_compiling():
        raise ConfigurationError(f"a step, or the network that it calls, is compiled: {COMPILE_STAGES}")
    raise ConfigurationError(
        f"the step, or a callback, computes with the images of the batch ({name}) outside the network: with strategy "
        "hybrid_pipeline the first stage alone has them, and a step may change them before it calls the network, but "
        "neither read values from them nor decide by them; do it in the network's forward, in the dataset, or in "
        "on_after_batch_transfer, which runs where they are (a loss that compares with the images needs them in the "
        "batch a second time, as targets; a second call of the network is to be a second input of the one call)"
    )
