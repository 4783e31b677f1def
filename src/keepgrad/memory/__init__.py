"""The memory of a training step: known before a run (`estimate`), and measured in one (`measure`).

Both keep a ledger of storages: when each appeared and was freed, and what it is. `estimate` runs the step on fake
tensors; `measure` runs the real step and asks torch's allocator for the peak; the ledger says what it consists of.

| part        | what                                                                                           |
| ---         | ---                                                                                            |
| parameters  | of the model                                                                                   |
| gradients   | of the parameters                                                                              |
| optimizer   | its state                                                                                      |
| activations | made in the forward pass and freed in the backward pass: what is kept for it                   |
| temporary   | everything else that operations make: results not kept, gradients on their way, recomputation  |
| other       | what was there before and is none of these: the batch, buffers                                 |

| file        | what                                                                                           |
| ---         | ---                                                                                            |
| estimated   | the step on tensors without data                                                               |
| measured    | the step that is run: peaks, and what is saved for backward                                    |
| ledger      | every storage of a step: when it appeared and was freed, and what it is                        |
| report      | the parts at the peak, as a table and as a picture                                             |
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
