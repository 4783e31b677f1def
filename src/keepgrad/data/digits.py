"""The default data: scikit-learn's handwritten digits, 1,797 images of 8x8 pixels, for a ViT with 64 tokens.

Images are enlarged to 32x32 pixels and cut into patches of 4x4. So a token shows one pixel of the original image, and
how the image changes from it to its neighbours. With patches of one pixel the model would learn far more slowly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import KeepgradError

if TYPE_CHECKING:
    from .images import Source

__all__ = ["SETTINGS", "sources"]

TEST = 360

SETTINGS: dict[str, Any] = {
    "model": "vit_tiny_patch16_224",
    "model_kwargs": {
        **{"img_size": 32, "patch_size": 4, "in_chans": 1, "embed_dim": 48, "depth": 3, "num_heads": 3},
        **{"class_token": False, "global_pool": "avg"},
    },
    "crop_pct": 1.0,
    "aug": False,
    "smoothing": 0.0,
    "epochs": 30,
    "batch_size": 32,
    "lr": 3e-3,
    "warmup_epochs": 2.0,
    "workers": 0,
}


class _Digits:
    classes = tuple(map(str, range(10)))
    found = ""

    def __init__(self) -> None:
        try:
            from PIL import Image
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise KeepgradError(f"{error}; training needs more packages: pip install 'keepgrad[train]'") from None

        found = load_digits()
        pixels = (torch.tensor(found.images) * 255 / 16).round().to(torch.uint8).numpy()
        self.images = [Image.fromarray(image) for image in pixels]
        self.labels = found.target.tolist()

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        return f"digit {index}"

    def read(self, index: int) -> tuple[Any, int]:
        return self.images[index], self.labels[index]


def sources() -> tuple[Source, Source]:
    """Return the digits to train on and the digits to evaluate on."""
    from .images import some_of

    whole = _Digits()
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0)).tolist()
    return some_of(whole, order[TEST:]), some_of(whole, order[:TEST])
