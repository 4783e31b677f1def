"""The mathematics: tensors in, tensors out. Nothing here knows a model or a configuration."""
