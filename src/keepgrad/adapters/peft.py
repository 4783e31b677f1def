"""PEFT: linear layers with low-rank adapters (LoRA, rsLoRA), and modules of which PEFT trains a full copy.

Plain LoRA has a stage of its own. Variants (DoRA and others) are treated like any module that keepgrad does not know.
If the adapters are merged or switched off, only the layer below them is used.
"""

from __future__ import annotations

from typing import Any

from ..ops.dropout import Drop
from ..ops.lora import Lora, LowRank
from .items import Step, Unsupported, path_of
from .modules import is_plain, one_step, opaque, reads, steps_for, steps_of


@steps_for("peft.tuners.lora.layer.Linear")
def _lora(m: Any) -> list[Step]:
    names = [name for name in m.active_adapters if name in m.lora_A]
    if m.disable_adapters and m.merged:
        raise Unsupported("its adapters are merged and switched off at once; call unmerge_adapter()")
    if m.disable_adapters or m.merged or not names:
        return steps_of(m.base_layer)
    if not all(_is_known(m, name) for name in names):
        return [opaque(m, draws=True)]
    base = one_step(m.base_layer)
    if base.stage.noises:
        return [opaque(m, draws=True)]
    adapters, refs = [], base.refs
    for name in names:
        down, up, drop = m.lora_A[name], m.lora_B[name], m.lora_dropout[name]
        p = getattr(drop, "p", 0) if drop.training else 0
        how = Drop(drop.forward, p) if p > 0 else None
        adapters.append(LowRank(m.scaling[name], up.bias is not None, how))
        refs += reads(down, "weight") + reads(up, "weight", "bias")
    return [Step(Lora(base.stage, len(base.refs), tuple(adapters)), refs)]


LINEAR = "torch.nn.modules.linear.Linear"
DROPOUTS = ("torch.nn.modules.dropout.Dropout", "torch.nn.modules.linear.Identity")


def _is_known(m: Any, name: str) -> bool:
    """True if an adapter is PEFT's plain LoRA, not a variant."""
    if name in getattr(m, "lora_variant", ()) or getattr(m, "use_dora", {}).get(name):
        return False
    if not getattr(m, "cast_input_dtype_enabled", True):
        return False
    layers, drop = (m.lora_A[name], m.lora_B[name]), m.lora_dropout[name]
    parts = (*layers, drop)
    is_built_so = all(path_of(one) == LINEAR for one in layers) and path_of(drop) in DROPOUTS
    return is_built_so and all(is_plain(part) for part in parts) and layers[0].bias is None


@steps_for("peft.utils.other.AuxiliaryTrainingWrapper", "peft.utils.other.ModulesToSaveWrapper")
def _saved(m: Any) -> list[Step]:
    """`modules_to_save`: a copy of a module, which is trained instead of the original."""
    if "modules_to_save" not in m._modules:
        return [opaque(m, draws=True)]
    names = m.active_adapters
    if m.disable_adapters or not names or any(name not in m.modules_to_save for name in names):
        return steps_of(m.original_module)
    return steps_of(m.modules_to_save[names[0]])
