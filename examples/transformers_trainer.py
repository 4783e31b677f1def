"""A ViT of transformers, trained by Trainer: keepgrad is a callback.

python examples/transformers_trainer.py
"""

import logging
import tempfile

import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from keepgrad.integrations.transformers import KeepgradCallback

logging.basicConfig(format="%(message)s")
logging.getLogger("keepgrad").setLevel(logging.INFO)  # shows the plan, saved bytes and cosines
torch.manual_seed(0)

# Your data: a dataset of dictionaries with the arguments of the model's forward.
data = [{"pixel_values": torch.randn(3, 32, 32), "labels": index % 4} for index in range(32)]

config = ViTConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    image_size=32, patch_size=4, num_labels=4,
)  # fmt: skip
model = ViTForImageClassification(config)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=10, per_device_train_batch_size=8, logging_steps=5, report_to="none",
        save_strategy="no", dataloader_pin_memory=False, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    callback = KeepgradCallback(preset="accurate", exact_last=0.1, cosine_every=5)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train()

for row in trainer.state.log_history:
    print(row)
