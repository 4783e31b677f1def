"""Training, built from timm's models, data and optimizers, and run by accelerate.

| file       | what                                                                                         |
| ---        | ---                                                                                          |
| config     | the settings of a training run, and the paper's recipes                                      |
| loop/      | the training loop for any task: its state, its records, how it stops, side-by-side runs      |
| classify   | the image classification task that the loop trains                                           |
| detect/    | the detection and segmentation task that the loop trains, and its detectors                  |

The random numbers of a step depend only on the seed, the step number, the batch within the step and the process
number. The random numbers for an image depend only on the seed, the epoch and the image. So a run can be resumed from
its weights, its optimizer state and its step number. No random states need to be saved, and the number of loader
processes may change.
"""
