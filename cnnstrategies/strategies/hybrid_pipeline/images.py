"""What a step gets in the place of the images, which the first stage alone has."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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


class ImagesElsewhere(Tensor):
    """Tells the shape, type and device of the images of a batch, and refuses to be computed with.

    A step that changed them (normalised them, say) before it called the network would change nothing that a pipeline
    computes: the first stage takes the images as they were loaded.

    Attributes:
        number: Which of the network's inputs it stands for.
    """

    number: int

    @classmethod
    def like(
        cls, rows: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device, number: int = 0
    ) -> "ImagesElsewhere":
        """A stand-in for ``rows`` images of a shape (C, H, W)."""
        images = torch.zeros((), dtype=dtype, device=device).expand(rows, *shape).as_subclass(cls)
        images.number = number
        return images

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"<images {tuple(self.shape)}, which the first stage has>"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer what is asked of the images' form, and refuse the rest.

        Raises:
            ConfigurationError: The images themselves are needed.
        """
        name = getattr(func, "__name__", str(func))
        if name in _FORM | _HARMLESS or name == "__get__":
            result = super().__torch_function__(func, types, tuple(args), dict(kwargs or {}))  # type: ignore[no-untyped-call]
            if not isinstance(result, Tensor):
                return result
            if name in _HARMLESS and result.dtype == args[0].dtype:
                assert isinstance(result, ImagesElsewhere)
                result.number = args[0].number
                return result
        raise ConfigurationError(
            f"the step, or a callback, computes with the images of the batch ({name}) outside the network: with "
            "strategy hybrid_pipeline the first stage alone has them, and takes them as they come; do it in the "
            "network's forward, in the dataset, or in on_after_batch_transfer, which runs where they are (a loss that "
            "compares with the images needs them in the batch a second time, as targets)"
        )
