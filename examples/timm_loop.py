"""A plain training loop on a model of timm: keepgrad is one line before it, and two words after it.

python examples/timm_loop.py
"""

import timm
import torch
from torch.nn import functional as F

import keepgrad

torch.manual_seed(0)
images, labels = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))  # your data

model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=10, depth=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

plan = keepgrad.apply(model, keep_ratio=0.5)
print(plan)

model.train()
for step in range(4):
    for batch, target in zip(images.split(16), labels.split(16), strict=True):
        loss = F.cross_entropy(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}")

# How well half of the positions speak for all of them, on this model and this batch.
report = keepgrad.fidelity(model, (images[:16], labels[:16]), F.cross_entropy, draws=2)
print(f"cosine with the exact gradient: {report.whole.cosine:.3f}")

keepgrad.remove(model)  # not needed for evaluation, which runs the model's own code anyway
model.eval()
with torch.no_grad():
    print(f"accuracy: {(model(images).argmax(1) == labels).float().mean().item():.2f}")
