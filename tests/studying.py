"""What tests of a study share."""

import json

from keepgrad.data import digits
from keepgrad.study.results import Results

SMALL = {**digits.SETTINGS["model_kwargs"], "img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 2, "num_heads": 2}
QUICK = {"model": "vit_tiny_patch16_224", "model_kwargs": SMALL, "crop_pct": 1.0, "batch_size": 8, "batches": 1}


QUICK |= {"draws": 1, "rounds": 1, "prepare": 2, "train": 2, "seeds": 2, "workers": 0}


def read(folder):
    results = Results.read(folder / "results.json", {})
    results.steps, results.seeds = QUICK["train"], ("0", "1")
    return results


def results_in(folder):
    return json.loads((folder / "results.json").read_text())
