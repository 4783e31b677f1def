"""A chain as straight code, that is, as generated Python functions without loops. Eager mode runs these.

Walking a chain stage by stage, with loops, tuples and a closure for each stage, takes more time on the CPU than
launching the kernels. So for every `Spec`, two Python functions are generated once. They do the same as `walk`:

    forward(x, tensors, kept, noise)                    -> output, saved values, extras of each stage
    backward(dy, tensors, kept, values, extras, dtypes) -> gradient of x, gradients of the tensors

`print(spec.backward(False).source)` shows one. Linear layers, layer norms and GELU are written out as calls of torch
functions. For any other stage, the code calls the stage's own methods. Between stages that are written out, rows are
flat, `[batch * slots, channels]`. Each variable is deleted after its last use, so that redone values are freed as early
as possible.

torch.compile runs `walk` instead: it cannot trace the code generation, and does not need it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from .attention import SelfAttention
from .stages import Gelu, LayerNorm, Linear, Point, Stage, cast
from .stages import gelu_backward as _gelu_backward
from .stages import layer_norm_backward as _layer_norm_backward
from .store import stored, unstored

if TYPE_CHECKING:
    from .spec import Spec, Turn

__all__ = ["typed_count", "write_backward", "write_forward"]

NAMES = {
    "torch": torch,
    "linear": F.linear,
    "layer_norm": torch.layer_norm,
    "native_layer_norm": torch.native_layer_norm,
    "layer_norm_backward": _layer_norm_backward,
    "gelu": F.gelu,
    "gelu_": torch.ops.aten.gelu_.default,
    "gelu_backward": _gelu_backward,
    "cast": cast,
    "stored": stored,
    "unstored": unstored,
    "Point": Point,
}


@cache
def _compiled(source: str) -> CodeType:
    return compile(source, "<keepgrad chain>", "exec")


class Code:
    """The lines of a function that is being generated. Every variable is assigned once."""

    def __init__(self, head: str) -> None:
        self.head = head
        self.lines: list[str] = []
        self.names: dict[str, Any] = dict(NAMES)
        self.variables: list[str] = []

    def new(self, hint: str) -> str:
        """The name of a new variable."""
        self.variables.append(f"{hint}_{len(self.variables)}")
        return self.variables[-1]

    def set(self, hint: str, value: str) -> str:
        """Add a line that sets a new variable to `value`, an expression; returns the name of the variable."""
        name = self.new(hint)
        self.lines.append(f"{name} = {value}")
        return name

    def constant(self, value: Any) -> str:
        """A name under which the generated code can use `value`, an object that exists already."""
        name = f"C{len(self.names)}"
        self.names[name] = value
        return name

    def unpack(self, names: Sequence[str], value: str) -> None:
        if names:
            self.lines.append(f"{', '.join(names)}, = {value}")

    def function(self, result: str) -> Callable[..., Any]:
        """The function with these lines, which returns `result`."""
        last: dict[str, int] = {}
        for number, line in enumerate([*self.lines, result]):
            last.update(dict.fromkeys(re.findall(r"\b[a-z]+_\d+\b", line), number))
        unused: dict[int, list[str]] = {}
        for name in self.variables:
            unused.setdefault(last[name], []).append(name)
        text = [f"def {self.head}:"]
        for number, line in enumerate(self.lines):
            if line.startswith("n_") and last[line.split()[0]] == number:
                continue  # a shape that no later line uses
            text.append(f"    {line}")
            if number in unused:
                text.append(f"    del {', '.join(unused[number])}")
        text.append(f"    return {result}")
        source = "\n".join(text)
        exec(_compiled(source), self.names)
        made = self.names[self.head.split("(")[0]]
        made.source = source
        return made


def _group(names: Sequence[str]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def write_forward(spec: Spec, start: int, end: int, packs: bool) -> Callable[..., Any]:
    """Generate the function that runs stages `start` to `end` on all rows.

    It saves the value before stage `start` only if that is the input of the chain.
    """
    code = Code("forward(x, tensors, kept, noise)")
    names = [f"t{i}" for i in range(spec.tensor_count)]
    code.unpack(names, "tensors")
    values, extras = [], []

    def save(i: int, rows: str) -> str | None:
        """Save the value before stage `i`. Returns its name if the rows themselves may be saved, not a copy."""
        slots = rows if not spec.reduced or spec.all_rows[i] else f"kept.gather({rows})"
        if packs:
            signs = i < spec.count and spec.stages[i].reads_signs
            values.append(code.set("v", f"stored({slots}, noise, {i}, {signs})"))
            return values[-1] if slots == rows else None
        values.append(slots if slots == rows else code.set("v", slots))
        return rows if slots == rows else None

    out = "x"
    held = save(0, out) if start == 0 and spec.saves[0] else None
    for i in range(start, end):
        stage, tensors = spec.stages[i], names[slice(*spec.places[i])]
        extra = "()"
        overwrites = spec.overwrites[i] and i > start and held != out
        if type(stage) is Gelu:
            given = f"({out}, approximate={stage.approximate!r})"
            plain, over = f"gelu{given}", f"gelu_{given}"
            if overwrites and held is not None:
                out = code.set("y", f"{over} if {held} is not {out} else {plain}")
            else:
                out = code.set("y", over if overwrites else plain)
        elif type(stage) is LayerNorm and spec.is_uniform:
            out = code.set("y", f"layer_norm({out}, {stage.shape}, {', '.join(tensors)}, {stage.eps!r})")
        elif type(stage) is Linear and spec.is_uniform:
            out = _linear(code, stage, out, tensors)
        else:
            before, out, extra = out, code.new("y"), code.new("e")
            forward = code.constant(stage.forward)
            code.lines.append(f"{out}, {extra} = {forward}({before}, {_group(tensors)}, kept, {spec.extras[i]})")
            if packs and not stage.exact_extras:
                extra = code.set("e", f"tuple([stored(one, noise, {i + 7}) for one in {extra}])")
        extras.append(extra)
        held = save(i + 1, out) if spec.saves[i + 1] else None
    return code.function(f"{out}, [{', '.join(values)}], [{', '.join(extras)}]")


def _linear(code: Code, stage: Linear, x: str, tensors: Sequence[str]) -> str:
    out = code.set("y", f"linear({x}, {', '.join(tensors[: 1 + stage.has_bias])})")
    return code.set("y", f"{out}.mul_({tensors[-1]})") if stage.scaled else out


class Rows:
    """Rows in generated code, which can be used as `[batch, slots, channels]` (`full`) or flat (`flat`).

    The code that converts one to the other is written when it is first asked for. For flat rows computed from other
    rows, `like` are those others; both have the same batch and slots.
    """

    def __init__(self, code: Code, full: str | None = None, flat: str | None = None, like: Rows | None = None) -> None:
        self.code, self.full_name, self.flat_name = code, full, flat
        self.lead: str | None = None if like is None else like.lead

    @property
    def full(self) -> str:
        if self.full_name is None:
            self.full_name = self.code.set("r", f"{self.flat_name}.view(*{self.lead}, {self.flat_name}.shape[1])")
        return self.full_name

    @property
    def flat(self) -> str:
        if self.flat_name is None:
            self.lead = self.code.set("n", f"{self.full_name}.shape[:-1]")
            self.flat_name = self.code.set("f", f"{self.full_name}.flatten(0, -2)")
        return self.flat_name


def write_backward(spec: Spec, packs: bool) -> Callable[..., Any]:
    """Generate the function that takes the gradient of the chain's output back to its input and its tensors."""
    code = Code("backward(dy, tensors, kept, values, extras, dtypes)")
    names = [f"t{i}" for i in range(spec.tensor_count)]
    code.unpack(names, "tensors")
    code.unpack([f"v{i}" for i in spec.saved_at], "values")
    reduced = spec.reduced and not spec.all_rows[-1]
    grad = code.set("g", "cast(kept.gather_grad(dy), dtypes[0])" if reduced else "cast(dy, dtypes[0])")
    rows: Rows | None = Rows(code, grad)
    is_owned = reduced
    found = ["None"] * spec.tensor_count
    for start, turns in spec.segments:
        pulls = _redo(code, spec, start, turns, names, packs)
        for turn, pull in zip(reversed(turns), reversed(pulls), strict=True):
            if turn.place < spec.first:
                break
            assert rows is not None
            if turn.stage.overwrites and not is_owned:
                rows = Rows(code, flat=code.set("g", f"{rows.flat}.clone()"), like=rows)
            rows, found[slice(*spec.places[turn.place])] = pull(rows)
            is_owned = turn.stage.makes_new
    dx = "None"
    if spec.input_needs:
        assert rows is not None
        dx = code.set("d", f"cast({rows.full}, dtypes[1])")
        onto = "cast(dy, dtypes[1])" if spec.adds_input else "None"
        if spec.reduced and not spec.all_rows[0]:
            dx = f"kept.give_back({dx}, {onto})"
        elif spec.adds_input:
            dx = f"{dx} + {onto}"
    return code.function(f"({dx}, {_group(found)})")


WrittenPull = Callable[[Rows], "tuple[Rows | None, list[str]]"]


def _redo(
    code: Code, spec: Spec, start: int, turns: Sequence[Turn], names: list[str], packs: bool
) -> list[WrittenPull]:
    """Write the code that redoes the stages of a segment from the saved value before it.

    Returns, for each stage, the function that writes the code of its pull-back.
    """
    value: Rows | None = None
    if spec.saves[start]:
        value = Rows(code, code.set("x", f"unstored(v{start})") if packs else f"v{start}")
    pulls = []
    for turn in turns:
        extra = f"[unstored(one) for one in extras[{turn.place}]]" if packs else f"extras[{turn.place}]"
        write = _writer(turn.stage) if spec.is_uniform else _own
        value, pull = write(code, turn.stage, turn, value, names[slice(*spec.places[turn.place])], extra)
        pulls.append(pull)
    return pulls


def _gelu(
    code: Code, stage: Gelu, turn: Turn, x: Rows | None, tensors: Sequence[str], extra: str
) -> tuple[Rows | None, WrittenPull]:
    assert x is not None
    rows = x.flat
    out = f"gelu({rows}, approximate={stage.approximate!r})"

    def write(grad: Rows) -> tuple[Rows, list[str]]:
        code.lines.append(
            f"gelu_backward({grad.flat}, {rows}, approximate={stage.approximate!r}, grad_input={grad.flat})"
        )
        return grad, []

    return Rows(code, flat=code.set("y", out), like=x) if turn.need_output else None, write


def _layer_norm(
    code: Code, stage: LayerNorm, turn: Turn, x: Rows | None, tensors: Sequence[str], extra: str
) -> tuple[Rows | None, WrittenPull]:
    assert x is not None
    rows, (weight, bias) = x.flat, tensors
    out, mean, rstd = code.new("y"), code.new("m"), code.new("s")
    code.lines.append(
        f"{out}, {mean}, {rstd} = native_layer_norm({rows}, {stage.shape}, {weight}, {bias}, {stage.eps!r})"
    )

    def write(grad: Rows) -> tuple[Rows, list[str]]:
        found = [code.new("g"), code.new("d"), code.new("d")]
        given = f"{grad.flat}, {rows}, {stage.shape}, {mean}, {rstd}, {weight}, {bias}"
        code.lines.append(f"{', '.join(found)} = layer_norm_backward({given}, {[turn.need_input, *turn.needs]})")
        return Rows(code, flat=found[0], like=grad), found[1:]

    return Rows(code, flat=out, like=x), write


def _linear_stage(
    code: Code, stage: Linear, turn: Turn, x: Rows | None, tensors: Sequence[str], extra: str
) -> tuple[Rows | None, WrittenPull]:
    rows, out = "None", None
    if turn.need_output or stage.needs_input(turn.needs, False):
        assert x is not None
        rows = x.flat
    if turn.need_output:
        out = Rows(code, flat=_linear(code, stage, rows, tensors), like=x)

    def write(grad: Rows) -> tuple[Rows | None, list[str]]:
        dy, weight, needs = grad.flat, tensors[0], turn.needs
        if stage.scaled:
            found, weight = [code.new("d") for _ in tensors], code.new("w")
            scaled = code.constant(stage.backward_scaled)
            code.lines.append(f"{_group(found)}, {weight} = {scaled}({rows}, {_group(tensors)}, {needs}, {dy})")
        else:
            found = [code.set("d", f"{dy}.t().mm({rows})") if needs[0] else "None"]
            if stage.has_bias:
                found.append(code.set("d", f"{dy}.sum(0)") if needs[1] else "None")
        return Rows(code, flat=code.set("g", f"{dy}.mm({weight})"), like=grad) if turn.need_input else None, found

    return out, write


def _attention(
    code: Code, stage: SelfAttention, turn: Turn, x: Rows | None, tensors: Sequence[str], extra: str
) -> tuple[Rows | None, WrittenPull]:
    projection, core = stage.split_tensors(tuple(tensors))
    needs, core_needs = stage.split_tensors(turn.needs)
    layer: Any = stage.projection
    if turn.redoes:
        assert x is not None
        qkv = _linear(code, layer, x.full, projection)
    else:
        qkv = code.new("q")
        code.unpack([qkv], extra)
    _, write_layer = _linear_stage(code, layer, turn._replace(needs=needs, need_output=False), x, projection, "()")
    out, pull = code.new("y"), code.new("p")
    vjp = code.constant(stage.vjp_core)
    code.lines.append(f"{out}, {pull} = {vjp}({qkv}, {_group(core)}, {core_needs}, kept)")

    def write(grad: Rows) -> tuple[Rows | None, list[str]]:
        d_qkv, found = code.new("g"), [code.new("d") for _ in core]
        code.lines.append(f"{d_qkv}, {_group(found) if found else code.new('d')} = {pull}({grad.full})")
        dx, d_layer = write_layer(Rows(code, d_qkv))
        return dx, [*d_layer, *found]

    return Rows(code, out), write


def _own(
    code: Code, stage: Stage, turn: Turn, x: Rows | None, tensors: Sequence[str], extra: str
) -> tuple[Rows | None, WrittenPull]:
    """Write the code of a stage as calls of its own methods."""
    vjp = code.constant(stage.vjp)
    given = f"{None if x is None else x.full}, {_group(tensors)}, {turn.needs}, {extra}, kept"
    out, pull = code.new("y"), code.new("p")
    code.lines.append(f"{out}, {pull} = {vjp}(Point({given}, {turn.need_output}, {turn.need_input}))")
    if turn.casts_output is not None:
        # Hold the output in the type in which the next stage reads it.
        out = code.set("y", f"None if {out} is None else {out}.to({turn.casts_output})")

    def write(grad: Rows) -> tuple[Rows, list[str]]:
        dx, found = code.new("g"), [code.new("d") for _ in tensors]
        code.lines.append(f"{dx}, {_group(found) if found else code.new('d')} = {pull}({grad.full})")
        return Rows(code, dx), found

    return Rows(code, out), write


def _writer(stage: Stage) -> Callable[..., tuple[Rows | None, WrittenPull]]:
    """The function that writes the backward of a stage if all its tensors have the dtype of the rows."""
    kind: Any = type(stage)
    if kind is SelfAttention:
        return _attention if stage.method == "qkv" and type(stage.projection) is Linear else _own  # type: ignore[attr-defined]
    if kind is LayerNorm:
        return _layer_norm if len(stage.shape) == 1 else _own  # type: ignore[attr-defined]
    table: dict[Any, Callable[..., Any]] = {Gelu: _gelu, Linear: _linear_stage}
    return table.get(kind, _own)


def typed_count(stage: Stage, count: int) -> int:
    """How many of the `count` tensors of a stage must have the dtype of the rows, so that it can be written out."""
    if isinstance(stage, SelfAttention):
        count = stage.counts[0]
    return 0 if _writer(stage) is _own else count
