"""Packs saved tensors into 8 bits.

A tensor is packed in groups of neighbouring values along its last dimension, as a rule at most `GROUP` values each. A
group is stored as one int8 in [-126, 126] for each value, and one float32 scale to multiply them with.

Rounding is stochastic: a value between two whole numbers is rounded up or down at random, so that it is right on
average. For example, 2.3 becomes 3 with a probability of 0.3, and otherwise 2. So the errors average out over steps and
over positions. The random numbers repeat along the diagonals of the table `[groups, values of a group]`: value j of
group i uses number i + j. So hardly more numbers are drawn than there are groups, and neighbours get different ones.

Zeros stay zeros. A group that contains a NaN or an infinite value gets a scale that is not finite, so it is unpacked to
values that are not finite either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch import is_fake, is_real, only_counts
from ..sampling import hashed
from .stages import cast

__all__ = ["STORES", "Packed", "dither", "pack", "packs", "stored", "unpack", "unstored"]

STORES = ("full", "int8")
TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types that are packed. Not float64: whoever uses it wants every digit."""
GROUP = 128
LEAST_GROUP = 16
MOST_GROUP = 4096
CPU_ROWS = 2**13
"""How many groups are packed at a time on the CPU; that many fit the processor's cache."""
ROWS = 2**18
"""How many groups are packed at a time on other devices; this limits the size of temporaries."""
SHIFTS = 2**11
"""Limit of the offset into the random numbers. It depends on the site and the value, so that not all round alike."""
LEVELS = 126
TINY = 1e-32
"""Added to every scale, so that none is zero or too small to divide by."""
_SALT = 4


class Packed(NamedTuple):
    """Codes `[..., groups, values of a group]`, scales `[..., groups, 1]`, and the type to unpack to.

    The float32 scales are held as int32 tensors with the same bits, so that hooks that compress the floating-point
    tensors others save do not round them.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype


def packs(tensor: Tensor) -> bool:
    """Whether a tensor can be packed, and is large enough for packing to be worth it."""
    return (
        tensor.dtype in TYPES
        and (is_real(tensor) or is_fake(tensor))
        and tensor.shape[-1] >= LEAST_GROUP
        and group_of(tensor.shape[-1]) <= MOST_GROUP
    )


def group_of(width: int) -> int:
    """How many values are in a group.

    It is the largest divisor of `width` from `LEAST_GROUP` to `GROUP`, or `width` itself if there is none.
    """
    found = (size for size in range(min(GROUP, width), LEAST_GROUP - 1, -1) if width % size == 0)
    return next(found, width)


def dither(step_seed: int | Tensor, like: Tensor) -> Tensor:
    """The random numbers of a step, in [0, 1), to `pack` tensors like `like`. They depend on the seed alone."""
    count = _rows_at_once(like) + MOST_GROUP + 2 * SHIFTS
    if isinstance(step_seed, Tensor):
        return (hashed(step_seed, _SALT, count) & 1023) / 1024
    if is_fake(like) or like.is_meta:
        return torch.empty(count, device=like.device)
    generator = torch.Generator(like.device).manual_seed(step_seed)
    return torch.rand(count, generator=generator, device=like.device)


def pack(tensor: Tensor, noise: Tensor, number: int = 0, keeps_signs: bool = False) -> Packed:
    """Pack a tensor into 8 bits.

    Give each tensor of a step another `number`, so that they are not rounded in the same way. With `keeps_signs` only
    zeros become zeros. That is for stages such as ReLU, where a value that is rounded to zero would lose its gradient.
    """
    group = group_of(tensor.shape[-1])
    shape = (*tensor.shape[:-1], tensor.shape[-1] // group)
    count, at_once = tensor.numel() // group, _rows_at_once(tensor)
    shift = number * 131 % SHIFTS
    table = noise[shift : shift + min(count, at_once) + group - 1].unfold(0, group, 1)
    bits = torch.empty(*shape, 1, dtype=torch.int32, device=tensor.device)
    scales = bits.view(torch.float32)
    if count <= at_once:
        code = _rounded(tensor.reshape(*shape, group), table.view(*shape, group), keeps_signs, scales)
        return Packed(code.to(torch.int8), bits, tensor.dtype)
    rows = tensor.reshape(-1, group)
    codes = torch.empty(*shape, group, dtype=torch.int8, device=tensor.device)
    work = torch.empty(at_once, group, dtype=torch.float32, device=tensor.device)
    for some, some_codes, scale in _pieces(rows, codes.view(-1, group), scales.view(-1, 1)):
        length = some.shape[0]
        some_codes.copy_(_rounded(some, table[:length], keeps_signs, scale, work[:length]))
    return Packed(codes, bits, tensor.dtype)


def _rounded(rows: Tensor, noise: Tensor, keeps_signs: bool, scale: Tensor, code: Tensor | None = None) -> Tensor:
    """Round groups to whole numbers, still as floats, into `code` if it is given. Writes their scales to `scale`."""
    rows = cast(rows, torch.float32)
    code = torch.abs(rows, out=code)
    torch.amax(code, -1, keepdim=True, out=scale).mul_(1 / LEVELS).add_(TINY)
    torch.addcdiv(noise, code if keeps_signs else rows, scale, out=code).floor_()
    if keeps_signs:
        code.clamp_(min=1).mul_(rows.sign())
    return code


def unpack(given: Packed) -> Tensor:
    """Unpack a tensor; its values are rounded."""
    codes, scales, dtype = given
    *shape, groups, group = codes.shape
    scales = scales.view(torch.float32)
    if codes.numel() <= _rows_at_once(codes) * group:
        return cast(codes * scales, dtype).reshape(*shape, groups * group)
    out = torch.empty(*shape, groups * group, dtype=dtype, device=codes.device)
    for some, some_codes, scale in _pieces(out.view(-1, group), codes.view(-1, group), scales.view(-1, 1)):
        some.copy_(some_codes).mul_(scale)
    return out


def stored(tensor: Tensor, noise: Tensor, number: int, keeps_signs: bool = False) -> Tensor | Packed:
    """The tensor packed, or the tensor itself if `packs` is False for it."""
    return pack(tensor, noise, number, keeps_signs) if packs(tensor) else tensor


def unstored(given: Tensor | Packed) -> Tensor:
    """The tensor that `stored` was given, unpacked if it was packed."""
    return unpack(given) if isinstance(given, Packed) else given


def _rows_at_once(tensor: Tensor) -> int:
    on_cpu = tensor.device.type == "cpu" and is_real(tensor) and not torch.compiler.is_compiling()
    return CPU_ROWS if on_cpu else ROWS


def _pieces(*tables: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of several tables, some rows at a time. If only bytes are counted, two pieces are enough."""
    count = _rows_at_once(tables[0])
    if only_counts(tables[0]):
        tables = tuple(table[: 2 * count] for table in tables)
    return zip(*(table.split(count) for table in tables), strict=True)
