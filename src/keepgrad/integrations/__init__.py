"""keepgrad in the training loops of others: a callback for transformers' Trainer, and one for Lightning."""
