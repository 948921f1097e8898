"""Tensors of which each rank has some rows, while every rank runs the same program.

An image is divided along its height, or another dimension. The program sees tensors of the shape of the whole image,
and gets the values, gradients and statistics of the whole image. Each operation computes the rows of each rank: a
convolution first fetches the rows at the edges from the neighbours. `runner.py` has the table of operations, and an
operation that is not in the table gathers all rows, which is recorded.

The package needs only torch, so a script without Lightning can use it. ::

    with SpatialParts(GroupLink(group)) as parts:
        images, targets = parts.scatter(images, axis=-2), parts.scatter(targets, axis=-2)
        loss = criterion(network(images), targets)
        loss.backward()

The files are: `layout` (which rank has which rows), `link` (messages between ranks), `parts` (rows are fetched from
other ranks, and values for them are given back), `requested_rows` (rows that other ranks are sending), `rows_tensor`
(the tensor), `runner` (operations, by the table of their rules, and parts across rows, which are views on one
device), `edges` (rows of a convolution that need other ranks' rows), `gradient_sums` (gradients of parameters
are summed together), and the rules themselves: `convolutions`, `losses`, `matrices`, `norms`, `pointwise`,
`pooling`, `reductions`, `resampling` and `views`.
"""

from cnnstrategies.spatial.link import GroupLink, PartsLink
from cnnstrategies.spatial.parts import Gathers, SpatialParts
from cnnstrategies.spatial.rows_tensor import RowsTensor

__all__ = ["Gathers", "GroupLink", "PartsLink", "SpatialParts", "RowsTensor"]
