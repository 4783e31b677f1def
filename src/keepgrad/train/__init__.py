"""Training on timm's parts, run by accelerate.

| file       | what                                                                                         |
| ---        | ---                                                                                          |
| flags      | a dataclass as command-line flags and as YAML                                                |
| config     | the settings of a training run, and the paper's recipes                                      |
| loop       | the loop of any task: steps, evaluation, checkpoints, the switch to exact gradients, signals |
| state      | what `--resume` continues from, and weights for others                                       |
| record     | metrics.csv, TensorBoard, the picture of the curves, the progress bar                        |
| order      | which samples come when, and with which random numbers                                       |
| models     | models of timm by name                                                                       |
| images     | images with labels, from a folder, a tar or whatever timm reads                              |
| folder     | a folder of class folders: what is in it, and what is left out                               |
| pixels     | images of PIL in the bits and channels that a model takes                                    |
| classify   | image classification, as a task of the loop                                                  |
| digits     | the embedded default: scikit-learn's digits                                                  |
| coco       | images with boxes and masks in COCO's layout, and average precision                          |
| detectors  | Mask R-CNN and Cascade Mask R-CNN on backbones of timm                                       |
| cascade    | the heads of Cascade R-CNN                                                                   |
| detect     | detection and segmentation, as a task of the loop                                            |
| shapes     | a small synthetic set for it                                                                 |
| side_by_side | a task with full backprop and with keepgrad, compared                                      |

All randomness of a step is a function of the seed, the number of the step and that of the process, and that of an
image a function of the seed, the epoch and the image. So a run is continued by its weights, its optimizer and the
number of the step; neither random states nor the number of loader processes matter.
"""
