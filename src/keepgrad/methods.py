"""The training methods that are compared: one list for `bench`, `estimate`, `fit` and the scripts in `benchmarks/`.

`put_on` is a context manager that changes the model to use a method, and undoes the change at the end. It yields the
function to call in place of the model:

    with METHODS["checkpointing"].put_on(model) as forward:
        forward(images)

For a keepgrad setting that is not in the list, `kept(keep_ratio=0.5, save="input")` makes a method and its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ._torch import tree_map_only
from .adapters import find_blocks
from .baseline import algorithm1
from .config import KeepConfig
from .errors import CheckpointingError
from .patch import apply, plan, remove

__all__ = ["CHECKPOINTING", "FULL", "METHODS", "Method", "checkpointed", "kept", "methods_for"]

Forward = Callable[..., Any]
PutOn = Callable[[nn.Module], AbstractContextManager[Forward]]


@dataclass(frozen=True)
class Method:
    """A method of training, such as full backprop, checkpointing or a setting of keepgrad.

    Args:
        name: its name in tables.
        put_on: a context manager that changes a model, and yields the function to call in place of the model.
        options: the options for `keepgrad.apply`; None for methods that do not use keepgrad.
        is_exact: True if its gradients are those of full backprop, up to rounding.
        can_estimate: True if it runs on tensors without data, as `estimate` needs.
        saves_openly: True if saved-tensor hooks see what it saves for backward.
        is_compiled: True if it compiles the model itself.
        text: True if it is for language models only, False if for all other models only, None if for both.
    """

    name: str
    put_on: PutOn
    options: Mapping[str, Any] | None = None
    is_exact: bool = False
    can_estimate: bool = True
    saves_openly: bool = True
    is_compiled: bool = False
    text: bool | None = None


def kept(text: bool | None = None, **options: Any) -> Method:
    """The method that uses keepgrad with these options of `apply`."""

    @contextmanager
    def put_on(model: nn.Module) -> Iterator[Forward]:
        apply(model, **options)
        try:
            yield model
        finally:
            remove(model)

    is_exact = options.get("preset") == "exact" and "store" not in options
    return Method(f"keepgrad {_words(options)}", put_on, options, is_exact, text=text)


def _words(options: Mapping[str, Any]) -> str:
    """Options as they are written in a table: "accurate, int8" for `preset="accurate", store="int8"`."""
    if options in ({"preset": "accurate"}, {"preset": "text"}):
        return f"{options['preset']} (default)"
    words = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            words += [f"{branch} {one}" for branch, one in value.items()]
        else:
            words.append(str(value) if name in ("preset", "keep_ratio", "store") else f"{name} {value}")
    return ", ".join(words) or "default"


def methods_for(model: nn.Module, options: Mapping[str, Any] | None = None) -> list[Method]:
    """The methods in `METHODS` for this kind of model, and keepgrad with `options` if they are given."""
    blocks = find_blocks(model)
    text = bool(blocks) and all(block.is_text for block in blocks)
    found = {name: method for name, method in METHODS.items() if method.text in (None, text)}
    if options:
        own = kept(**options)
        found.setdefault(own.name, own)
    return list(found.values())


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[nn.Module]:
    """Turn on the model's own checkpointing, and restore its previous state at the end.

    Raises:
        CheckpointingError: if the model does not support checkpointing.
    """
    # models of transformers; newer versions have renamed these methods
    enable, disable = (
        getattr(model, f"activation_checkpointing_{do}", getattr(model, f"gradient_checkpointing_{do}", None))
        for do in ("enable", "disable")
    )
    if enable is not None and disable is not None:
        if not getattr(model, "supports_gradient_checkpointing", True):
            raise CheckpointingError(f"{type(model).__name__} does not support checkpointing")
        was_on = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
        enable()
        try:
            yield model
        finally:
            if not was_on:
                disable()
        return
    switch = getattr(model, "set_grad_checkpointing", None)
    if switch is None:
        raise CheckpointingError(f"{type(model).__name__} has no set_grad_checkpointing; keepgrad cannot turn it on")
    before = [(m, m.grad_checkpointing) for m in model.modules() if "grad_checkpointing" in vars(m)]
    try:
        try:
            switch(True)
        except AssertionError as error:
            raise CheckpointingError(f"{type(model).__name__} cannot be checkpointed: {error}") from None
        yield model
    finally:
        for module, state in before:
            module.grad_checkpointing = state


@contextmanager
def _as_it_is(model: nn.Module) -> Iterator[Forward]:
    yield model


@contextmanager
def _forwards_put_back(model: nn.Module) -> Iterator[None]:
    """At the end, give every module back the `forward` it had: that of its class, or its own attribute."""
    before = [(module, vars(module).get("forward")) for module in model.modules()]
    try:
        yield
    finally:
        for module, forward in before:
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


@contextmanager
def _selective(model: nn.Module) -> Iterator[Forward]:
    """Checkpoint each block, but save the results of matmuls, convolutions and attention."""
    aten = torch.ops.aten
    names = ["mm", "addmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu"]
    names += [f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")]
    heavy = [getattr(aten, name).default for name in names if hasattr(aten, name)]
    contexts = functools.partial(create_selective_checkpoint_contexts, heavy)
    with _forwards_put_back(model):
        for name in dict.fromkeys(site.name for site in plan(model, preset="exact").sites):
            block = model.get_submodule(name)
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
        yield model


@contextmanager
def _half_budget(model: nn.Module) -> Iterator[Forward]:
    """Use torch.compile with a budget of half of the activation memory."""
    import torch._functorch.config as config

    compiled = torch.compile(model)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with config.patch(activation_memory_budget=0.5):
            return compiled(*args, **kwargs)

    yield forward


@contextmanager
def _offloaded(model: nn.Module) -> Iterator[Forward]:
    """Copy what autograd saves to CPU memory."""
    pinned = any(parameter.is_cuda for parameter in model.parameters())

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
            return model(*args, **kwargs)

    yield forward


@contextmanager
def _half_of_the_samples(model: nn.Module) -> Iterator[Forward]:
    """Run all samples forward, but compute gradients for half of them only: the simplest way to save memory."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        def part(rows: Tensor) -> Any:
            some_args, some_kwargs = tree_map_only(Tensor, lambda t: t[rows.to(t.device)], (args, kwargs))
            return model(*some_args, **some_kwargs)

        count = len(next(iter((*args, *kwargs.values()))))
        order = torch.randperm(count)
        with torch.no_grad():
            dropped = part(order[count // 2 :])
        kept = part(order[: count // 2])
        back = order.argsort()
        whole = lambda a, b: torch.cat([a, b])[back.to(a.device)] if isinstance(a, Tensor) else a  # noqa: E731
        return tree_map(whole, kept, dropped)

    yield forward


def _published(name: str, **options: Any) -> Method:
    """The method that runs the paper's Algorithm 1 on the sites that `apply` would choose with these options."""

    @contextmanager
    def put_on(model: nn.Module) -> Iterator[Forward]:
        with _forwards_put_back(model):
            algorithm1(model, KeepConfig(**options))
            yield model

    return Method(f"Algorithm 1, {name}", put_on, text=False)


FULL = Method("full backprop", _as_it_is, is_exact=True)
CHECKPOINTING = Method("checkpointing", checkpointed, is_exact=True)

METHODS = {
    method.name: method
    for method in (
        FULL,
        CHECKPOINTING,
        Method("selective checkpointing", _selective, is_exact=True, can_estimate=False, saves_openly=False),
        Method("torch.compile, memory budget 0.5", _half_budget, is_exact=True, can_estimate=False, is_compiled=True),
        Method("offloading", _offloaded, is_exact=True, can_estimate=False, saves_openly=False),
        Method("half of the samples", _half_of_the_samples, can_estimate=False),
        _published("the paper's layers", preset="paper"),
        _published("0.5 all blocks", keep_ratio=0.5),
        kept(preset="exact"),
        kept(text=False, preset="accurate"),
        kept(text=True, preset="text"),
        kept(text=False, preset="balanced"),
        kept(text=False, preset="small"),
        kept(text=False, preset="paper"),
        kept(text=False, keep_ratio=0.5),
        kept(text=False, keep_ratio=0.25),
        kept(preset="exact", store="int8", text=False),
        kept(text=False, preset="accurate", store="int8"),
        kept(text=False, keep_ratio=0.5, store="int8"),
        kept(text=False, preset="small", store="full"),
        kept(text=False, keep_ratio=0.25, save="input"),
        kept(text=True, preset="text", save="input"),
    )
}
