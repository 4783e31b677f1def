"""The training loop, for any task.

| file         | what                                                                                       |
| ---          | ---                                                                                        |
| trainer      | steps, evaluation, checkpoints, signals                                                    |
| state        | the saved state that `--resume` continues from, and weight files for use elsewhere         |
| record       | metrics.csv, TensorBoard, the plot of the curves, the progress bar                         |
| stop         | how a run stops: on a signal, or when another process fails                                |
| side_by_side | trains a task with full backprop and with keepgrad, and compares the two                   |
"""

from .trainer import Outcome, Task, Trainer, accelerator_for, fitted

__all__ = ["Outcome", "Task", "Trainer", "accelerator_for", "fitted"]
