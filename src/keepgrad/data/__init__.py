"""The data that models are trained and measured on: reading it, and the order of the samples.

| file       | what                                                                                         |
| ---        | ---                                                                                          |
| images     | images with labels, from a folder, a tar or whatever timm reads                              |
| folder     | images in class folders: which files are used, and which are left out                        |
| coco       | images with boxes and masks in COCO's layout, and average precision                          |
| pixels     | converts PIL images to the bits and channels that a model takes                              |
| order      | the order of the samples, and the random numbers for each                                    |
| digits     | the default data: scikit-learn's digits                                                      |
| shapes     | a small synthetic set for detection                                                          |
"""
