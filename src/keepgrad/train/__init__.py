"""Training on timm's parts, run by accelerate.

| file       | what                                                                                         |
| ---        | ---                                                                                          |
| config     | the settings of a training run, and the paper's recipes                                      |
| loop/      | the loop of any task, its state, its record, how it stops, and two runs side by side         |
| classify   | image classification, as a task of the loop                                                  |
| detect/    | detection and segmentation, as a task of the loop, with its detectors                        |

All randomness of a step is a function of the seed, the number of the step and that of the process, and that of an
image a function of the seed, the epoch and the image. So a run is continued by its weights, its optimizer and the
number of the step; neither random states nor the number of loader processes matter.
"""
