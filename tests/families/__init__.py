"""A small model of every family keepgrad knows; `FAMILIES` has them by name. A new family is a new line in one of the
files.
"""

from .timm import FAMILIES as TIMM
from .timm_vit import FAMILIES as TIMM_VIT
from .timm_windows import FAMILIES as TIMM_WINDOWS
from .torch_nn import FAMILIES as TORCH_NN
from .torchvision import FAMILIES as TORCHVISION
from .transformers import FAMILIES as TRANSFORMERS
from .transformers_text import FAMILIES as TRANSFORMERS_TEXT
from .video import FAMILIES as VIDEO

FAMILIES = {
    **{**TIMM, **TIMM_VIT, **TIMM_WINDOWS, **TORCH_NN, **TORCHVISION},
    **{**TRANSFORMERS, **TRANSFORMERS_TEXT, **VIDEO},
}
