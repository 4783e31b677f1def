"""The loop of a training run, for any task.

| file         | what                                                                                       |
| ---          | ---                                                                                        |
| trainer      | steps, evaluation, checkpoints, signals                                                    |
| state        | what `--resume` continues from, and weights for others                                     |
| record       | metrics.csv, TensorBoard, the picture of the curves, the progress bar                      |
| stop         | how a run stops: at a signal, and with the other processes                                 |
| side_by_side | a task with full backprop and with keepgrad, compared                                      |
"""

from .trainer import Outcome, Task, Trainer, accelerator_for, fitted

__all__ = ["Outcome", "Task", "Trainer", "accelerator_for", "fitted"]
