"""A model of timm in a LightningModule: keepgrad is a callback.

python examples/lightning_fit.py
"""

import logging

import timm
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from keepgrad.integrations.lightning import KeepgradCallback

logging.basicConfig(format="%(message)s")
logging.getLogger("keepgrad").setLevel(logging.INFO)  # shows the plan, saved bytes and cosines


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = timm.create_model("convnext_atto", num_classes=4, depths=(1, 1, 1, 1), dims=(8, 16, 32, 64))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
data = TensorDataset(torch.randn(16, 3, 64, 64), torch.randint(4, (16,)))  # your data
task = Classifier()
task.losses = []

# module="net" is found by itself: it is the attribute that has blocks keepgrad knows.
callback = KeepgradCallback(keep_ratio=0.5, exact_last=0.1, cosine_every=2)
trainer = Trainer(
    max_epochs=2, accelerator="auto", devices=1, callbacks=[callback], logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(task, DataLoader(data, batch_size=4))
print("losses:", " ".join(f"{loss:.3f}" for loss in task.losses))
