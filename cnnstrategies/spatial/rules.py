"""The table of rules. An operation that is not in the table runs on all ranks with all rows, which is always right."""

from collections.abc import Callable, Mapping
from typing import Any

from cnnstrategies._torch_private import schema_of
from cnnstrategies.spatial import convolutions, draws, losses, matrices, norms, pooling, reductions, resampling, views
from cnnstrategies.spatial.pointwise import is_pointwise, new_like, pointwise

# A rule gets the rules of the rank, the operation and its arguments by name, and returns the results.
# `NotImplemented` means that the operation needs all rows.
Rule = Callable[[Any, Any, dict[str, Any]], Any]

_GROUPS: Mapping[Rule, str] = {
    convolutions.convolution: "convolution",
    convolutions.convolution_backward: "convolution_backward",
    norms.batch_norm: "native_batch_norm cudnn_batch_norm miopen_batch_norm",
    norms.batch_norm_backward: "native_batch_norm_backward cudnn_batch_norm_backward miopen_batch_norm_backward",
    norms.group_norm: "native_group_norm",
    norms.group_norm_backward: "native_group_norm_backward",
    norms.layer_norm: "native_layer_norm",
    norms.layer_norm_backward: "native_layer_norm_backward",
    matrices.product: "mm bmm addmm baddbmm",
    pooling.max_pool: "max_pool2d_with_indices max_pool3d_with_indices",
    pooling.max_pool_backward: "max_pool2d_with_indices_backward max_pool3d_with_indices_backward",
    pooling.average_pool: "avg_pool2d avg_pool3d",
    pooling.average_pool_backward: "avg_pool2d_backward avg_pool3d_backward",
    resampling.resample: (
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
        "_adaptive_avg_pool2d _adaptive_avg_pool3d reflection_pad1d reflection_pad2d reflection_pad3d "
        "replication_pad1d replication_pad2d replication_pad3d"
    ),
    resampling.resample_backward: (
        "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward "
        "_upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward "
        "upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward "
        "upsample_bicubic2d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward "
        "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward "
        "replication_pad2d_backward replication_pad3d_backward"
    ),
    losses.element_loss: "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits",
    losses.element_loss_backward: "mse_loss_backward smooth_l1_loss_backward huber_loss_backward "
    "soft_margin_loss_backward binary_cross_entropy_backward",
    losses.class_loss: "nll_loss_forward nll_loss2d_forward",
    losses.class_loss_backward: "nll_loss_backward nll_loss2d_backward",
    reductions.mean: "mean",
    reductions.variance: "var std var_mean std_mean",
    reductions.extreme: "max min",
    reductions.local_reduction: "argmax argmin linalg_vector_norm logsumexp",
    reductions.softmax: "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data glu_backward",
    reductions.reduction("sum"): "sum",
    reductions.reduction("max"): "amax any",
    reductions.reduction("min"): "amin all",
    draws.draw: (
        "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_ rand_like randn_like "
        "randint_like"
    ),
    draws.dropout: "native_dropout",
    new_like: "new_empty new_zeros new_ones new_full new_empty_strided",
    views.permute: "permute transpose t",
    views.view: "view _unsafe_view _reshape_alias",
    views.unsqueeze: "unsqueeze",
    views.squeeze: "squeeze",
    views.expand: "expand",
    views.one_dimension: "select split split_with_sizes unbind cumsum cumprod glu",
    views.index: "index index_put index_put_ _index_put_impl_ index_select index_add index_add_",
    views.along_dimension: "gather scatter scatter_ scatter_add scatter_add_",
    views.slice_rows: "slice",
    views.slice_backward: "slice_backward select_backward",
    views.as_strided: "as_strided",
    views.pixel_shuffle: "pixel_shuffle",
    views.pixel_unshuffle: "pixel_unshuffle",
    views.pad: "constant_pad_nd",
    views.cat: "cat",
    views.stack: "stack",
    views.flip: "flip",
    views.roll: "roll",
}
NAMES: Mapping[str, Rule] = {name: rule for rule, names in _GROUPS.items() for name in names.split()}


def rule_of(func: Any) -> Rule | None:
    """Return an operation's rule."""
    namespace, _, name = schema_of(func).name.partition("::")
    if namespace != "aten":
        return None
    return NAMES.get(name) or (pointwise if is_pointwise(func) else None)
