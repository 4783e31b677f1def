"""keepgrad in other libraries' training loops: a callback for transformers' Trainer, and one for Lightning."""
