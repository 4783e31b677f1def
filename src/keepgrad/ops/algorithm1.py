"""Algorithm 1 of the paper: stochastic backpropagation for any position-wise function.

The kept positions go through `f` with gradients, the dropped ones without, and the two results are put together. So
autograd saves tensors for the kept positions only. Because the forward is computed in two pieces, it equals `f(x)` only
if `f` does the same to every position, independently of the others. A LayerNorm or an MLP does; attention or a
convolution over positions does not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import InputError

__all__ = ["put_together", "sbp"]


def sbp(f: Callable[[Tensor], Tensor], x: Tensor, kept: Tensor, dim: int = 1) -> Tensor:
    """`f(x)`, with gradients from the kept positions only.

    Args:
        f: a module or function that maps positions independently; its output has the positions of its input.
        x: the input.
        kept: the kept positions along `dim`: indices without repetition, or a boolean mask.
        dim: the dimension of `x`, and of the output, along which positions lie.

    Raises:
        InputError: if an argument is of the wrong kind or does not fit, or if `f` changes the number of positions.
    """
    if not callable(f) or not isinstance(x, Tensor) or not isinstance(kept, Tensor):
        kinds = ", ".join(f"{name} is a {type(one).__name__}" for name, one in (("f", f), ("x", x), ("kept", kept)))
        raise InputError(f"{kinds}; give a module or a function, and two tensors")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise InputError(f"dim={dim!r} is no dimension of x, which has {x.dim()}; give a whole number")
    dim %= x.dim()
    positions = x.shape[dim]
    keep = _mask(kept, positions, dim)
    index_kept, index_dropped = keep.nonzero().squeeze(1), (~keep).nonzero().squeeze(1)
    return put_together(f, x, index_kept, index_dropped, dim)


def put_together(
    f: Callable[[Tensor], Tensor], x: Tensor, index_kept: Tensor, index_dropped: Tensor, dim: int = 1
) -> Tensor:
    """Run `f` on the kept positions with gradients and on the dropped ones without, and put both into one output.

    Raises:
        InputError: if `f` changes the number of positions.
    """
    out_kept = f(x.index_select(dim, index_kept))
    with torch.no_grad():
        out_dropped = f(x.index_select(dim, index_dropped))
    if out_kept.dim() <= dim or out_kept.shape[dim] != len(index_kept):
        raise InputError(
            f"f maps {len(index_kept)} positions along dim {dim} to an output of shape {tuple(out_kept.shape)}; "
            "sbp needs a position-wise f, which keeps that dimension"
        )
    shape = list(out_kept.shape)
    shape[dim] = x.shape[dim]
    out = out_kept.new_zeros(shape)
    # Assignment by index saves only the index for backward; index_copy would save the rows too.
    positions = out.movedim(dim, 0)
    positions[index_dropped] = out_dropped.to(out.dtype).movedim(dim, 0)
    positions[index_kept] = out_kept.movedim(dim, 0)
    return out


def _mask(kept: Tensor, positions: int, dim: int) -> Tensor:
    """The kept positions as a boolean mask."""
    if kept.dim() != 1:
        raise InputError(f"kept has {kept.dim()} dimensions; give indices or a boolean mask of one dimension")
    if kept.dtype == torch.bool:
        if len(kept) != positions:
            raise InputError(f"kept is a mask of {len(kept)} entries, but x has {positions} positions along dim {dim}")
        keep = kept
    elif kept.dtype.is_floating_point or kept.dtype.is_complex:
        raise InputError(f"kept is of {kept.dtype}; give integer indices or a boolean mask")
    else:
        if len(kept) and (int(kept.min()) < 0 or int(kept.max()) >= positions):
            raise InputError(f"kept has indices outside 0 to {positions - 1}, the positions of x along dim {dim}")
        keep = torch.zeros(positions, dtype=torch.bool, device=kept.device).index_fill(0, kept.long(), True)
        if int(keep.sum()) != len(kept):
            raise InputError("kept names a position twice; each position can be kept once")
    if not bool(keep.any()):
        raise InputError("kept is empty: no position would get a gradient; keep at least one")
    return keep
