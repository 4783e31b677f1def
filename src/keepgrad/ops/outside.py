"""Packs what autograd saves outside of sites into 8 bits.

`Outside` is a context for a forward pass. A saved-tensor hook packs each floating-point tensor that an operation saves.
A tensor is packed once, even if several operations save it: views of the same values share the packed copy. The tensor
itself is not held here.

These are not packed:
- parameters, buffers and the inputs of the model;
- tensors that have the shape of a parameter, because they may be weights that were cast, gathered or computed;
- integers and masks;
- small tensors;
- what the engine saves for a site, because it packs that itself;
- what the functions in `LEFT_ALONE` save.

A hook is not told which operation saves the tensor, so a `TorchFunctionMode` records the current function. Fused
attention saves q, k, v, its output and the logarithms of its softmax sums. These must belong together, so they cannot
be rounded separately. Here only q, k and v are saved, and attention is redone from them in backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from .._torch import is_fake, is_real, last_function_mode
from .chain import engine
from .stages import autocast_dtype, partial_vjp
from .store import GROUP, TYPES, Packed, pack, packs, unpack

__all__ = ["Outside", "observers"]

LEAST = 2**12
"""Tensors with fewer values are not packed."""
LEFT_ALONE = {
    F.scaled_dot_product_attention,
    F.cross_entropy,
    F.nll_loss,
    F.log_softmax,
    torch.log_softmax,
    Tensor.log_softmax,
}
READS_SIGNS = {
    *(F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.leaky_relu, F.leaky_relu_, F.prelu, torch.prelu),
    *(F.relu6, F.hardtanh, F.hardtanh_, F.threshold, F.rrelu),
}

observers: list[Callable[[Tensor], object]] = []
"""Functions that are called with every tensor that is held for backward here. Other saved-tensor hooks miss these."""


class _Whole(NamedTuple):
    """A packed tensor: its values flat, the last values (`tail`) if they do not fill a group, its shape and strides."""

    flat: Packed
    tail: Tensor | None
    shape: torch.Size
    stride: tuple[int, ...]


class Outside(TorchFunctionMode):
    """A context that packs what autograd saves while it is on.

    Args:
        parameters: the parameters of the model.
        others: its buffers and inputs.
        noise: a function from a tensor to the random numbers to round it with.
    """

    def __init__(
        self, parameters: Iterable[Tensor], others: Iterable[Tensor], noise: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        weights = list(parameters)
        self.own = {t.untyped_storage() for t in (*weights, *others) if is_real(t) or is_fake(t)}
        self.shapes = {shape for t in weights if t.dim() in (2, 4, 5) for shape in (t.shape, t.shape[::-1])}
        self.noise = noise
        self.number = 0
        self.caller: Any = None
        self.made: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()
        self.hooks: saved_tensors_hooks | None = None
        self.before: Outside | None = None

    def __enter__(self) -> Outside:
        self.hooks = saved_tensors_hooks(self.pack, self.unpack)
        self.hooks.__enter__()
        self.before, engine.outside = engine.outside, self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        assert self.hooks is not None
        self.hooks.__exit__(*error)
        self.hooks = None  # the hooks refer to this object
        engine.outside = self.before

    def pause(self) -> bool:
        """Stop intercepting torch functions, which costs time in each call.

        Returns:
            False if another mode was entered after this one, so that this one cannot be left.
        """
        if last_function_mode() is not self:
            return False
        super().__exit__(None, None, None)
        return True

    def resume(self) -> None:
        super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if engine.saves:
            return func(*args, **kwargs)
        before, self.caller = self.caller, func
        try:
            if func is F.scaled_dot_product_attention:
                return self._attend(*args, **kwargs)
            return func(*args, **kwargs)
        finally:
            self.caller = before

    def pack(self, tensor: Tensor) -> Any:
        held = self._pack(tensor)
        for observer in observers:
            for one in [held] if isinstance(held, Tensor) else held.flat[:2]:
                observer(one)
        return held

    def _pack(self, tensor: Tensor) -> Tensor | _Whole:
        if tensor.dtype not in TYPES or self.caller in LEFT_ALONE or engine.saves:
            return tensor
        if not (is_real(tensor) or is_fake(tensor)):
            return tensor
        storage = tensor.untyped_storage()
        if storage in self.own or tensor.shape in self.shapes:
            return tensor
        count, own_bytes = tensor.numel(), tensor.numel() * tensor.element_size()
        if count < LEAST:
            # Copy a small view, so that it does not keep the whole storage alive.
            return tensor.clone() if storage.nbytes() > 2 * own_bytes else tensor
        if storage.nbytes() < own_bytes:
            return tensor  # it was expanded: several entries share one value in memory
        flat, stride, is_copy = _flat(tensor)
        made = self.made.setdefault(storage, {})
        key = (tensor._version, tensor.storage_offset(), count, *((*tensor.shape, *tensor.stride()) if is_copy else ()))
        found = made.get(key)
        if found is None:
            self.number += 1
            noise, signs, whole = self.noise(tensor), self.caller in READS_SIGNS, count - count % GROUP
            tail = flat[whole:].clone() if whole < count else None
            found = made[key] = pack(flat[:whole], noise, self.number, signs), tail
        packed, tail = found
        return _Whole(packed, tail, tensor.shape, stride)

    @staticmethod
    def unpack(held: Tensor | _Whole) -> Tensor:
        if isinstance(held, Tensor):
            return held
        flat = unpack(held.flat)
        return (flat if held.tail is None else torch.cat([flat, held.tail])).as_strided(held.shape, held.stride)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **more: Any
    ) -> Tensor:
        dropout = rest[0] if rest else more.get("dropout_p", 0.0)
        if dropout > 0 or not (packs(query) and packs(key) and packs(value)):
            return F.scaled_dot_product_attention(query, key, value, attn_mask, *rest, **more)
        self.number += 3
        return _Attention.apply((rest, more), self.noise(query), self.number, query, key, value, attn_mask)


def _flat(tensor: Tensor) -> tuple[Tensor, tuple[int, ...], bool]:
    """The values of a tensor in memory order, its strides, and whether it had to be copied because there are gaps."""
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.permute(by_stride)
    if dense.is_contiguous():
        return dense.view(-1), tensor.stride(), False
    copy = tensor.contiguous()
    return copy.view(-1), copy.stride(), True


class _Attention(torch.autograd.Function):
    """torch's attention. It saves q, k and v in 8 bits and is redone from them in backward."""

    @staticmethod
    def forward(ctx, options: Any, noise: Tensor, number: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None):
        rest, more = ctx.options = options
        ctx.autocast = autocast_dtype(q)
        packed = [pack(rows, noise, number + i) for i, rows in enumerate((q, k, v))]
        ctx.dtypes = [one.dtype for one in packed]
        ctx.save_for_backward(mask, *(t for one in packed for t in one[:2]))
        return F.scaled_dot_product_attention(q, k, v, mask, *rest, **more)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        mask, *packed = ctx.saved_tensors
        rest, more = ctx.options
        q, k, v = (unpack(Packed(*one)) for one in zip(packed[::2], packed[1::2], ctx.dtypes, strict=True))
        tensors = (k, v) if mask is None else (k, v, mask)

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, mask, *rest, **more)

        needs = ctx.needs_input_grad[4:]
        with torch.autocast(q.device.type, dtype=ctx.autocast, enabled=ctx.autocast is not None, cache_enabled=False):
            dq, found = partial_vjp(attend, q, tensors, needs[: len(tensors)])[1](grad)
        return None, None, None, dq, *found, *(None,) * (3 - len(found))
