"""The memory of a training step: `estimate` predicts it without running the step, `measure` runs the step.

Both keep a ledger of storages: when each appeared, when it was freed, and what it holds. `estimate` runs the step on
fake tensors. `measure` runs the real step and asks torch's allocator for the peak; the ledger says what the peak
consists of.

| part        | what                                                                                           |
| ---         | ---                                                                                            |
| parameters  | the parameters of the model                                                                    |
| gradients   | the gradients of the parameters                                                                |
| optimizer   | the state of the optimizer                                                                     |
| activations | made in the forward pass and freed in the backward pass: what is saved for backward            |
| temporary   | everything else that operations make: results not saved, gradients inside, recomputed values   |
| other       | what was there before the step and is none of these: the batch, buffers                        |

| file        | what                                                                                           |
| ---         | ---                                                                                            |
| estimated   | the step on tensors without data                                                               |
| measured    | the real step: peaks, and what is saved for backward                                           |
| ledger      | every storage of a step: when it appeared and was freed, and what it holds                     |
| report      | the parts at the peak, as a table and as a plot                                                |
| autocast    | autocast by CUDA's rules, on any device                                                        |
| optimizers  | the bytes of an optimizer's state                                                              |
| sharding    | what one device of many holds, with DDP or FSDP2                                               |
"""

from .autocast import AMP
from .estimated import estimate
from .measured import allocated_peak, measure, peak_bytes, saved_bytes
from .optimizers import OPTIMIZERS
from .report import PARTS, MemoryReport

__all__ = [
    "AMP",
    "OPTIMIZERS",
    "PARTS",
    "MemoryReport",
    "allocated_peak",
    "estimate",
    "measure",
    "peak_bytes",
    "saved_bytes",
]
