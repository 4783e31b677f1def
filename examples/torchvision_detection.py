"""A detector of torchvision on a ConvNeXt of timm: keepgrad on the backbone, everything else as it is.

python examples/torchvision_detection.py
"""

from collections import OrderedDict

import timm
import torch
from torch import nn
from torchvision.models.detection import FasterRCNN
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

import keepgrad


class Backbone(nn.Module):
    """The maps of a ConvNeXt at four resolutions, and a feature pyramid on them."""

    def __init__(self):
        super().__init__()
        self.trunk = timm.create_model("convnext_atto", features_only=True, depths=(1, 1, 1, 1), dims=(8, 16, 32, 64))
        self.pyramid = FeaturePyramidNetwork(self.trunk.feature_info.channels(), 16, LastLevelMaxPool())
        self.out_channels = 16

    def forward(self, images):
        maps = self.trunk(images)
        return self.pyramid(OrderedDict((str(level), one) for level, one in enumerate(maps)))


torch.manual_seed(0)
model = FasterRCNN(Backbone(), num_classes=3, min_size=128, max_size=128)
print(keepgrad.apply(model.backbone.trunk, keep_ratio=0.5))

images = [torch.rand(3, 128, 128) for _ in range(2)]  # your data
targets = [
    {"boxes": torch.tensor([[10.0, 10.0, 60.0, 60.0]]), "labels": torch.tensor([1])},
    {"boxes": torch.tensor([[40.0, 30.0, 100.0, 90.0]]), "labels": torch.tensor([2])},
]
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

model.train()
for step in range(3):
    loss = sum(model(images, targets).values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}")

model.eval()
with torch.no_grad():
    print(f"boxes found: {[len(found['boxes']) for found in model(images)]}")
