"""What keepgrad is compared with besides the paper's Algorithm 1: dropping samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SomeSamples(nn.Module):
    """The trivial baseline: all samples forward, gradients from a share of them only."""

    def __init__(self, model: nn.Module, share: float) -> None:
        super().__init__()
        self.model, self.share = model, share

    def forward(self, x: Tensor) -> Tensor:
        order = torch.randperm(len(x))
        count = int(len(x) * self.share)
        with torch.no_grad():
            dropped = self.model(x[order[count:]])
        out = torch.cat([self.model(x[order[:count]]), dropped])
        return out[order.argsort()]
