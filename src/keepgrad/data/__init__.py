"""What models are trained and measured on: files that are read, and the order in which samples come.

| file       | what                                                                                         |
| ---        | ---                                                                                          |
| images     | images with labels, from a folder, a tar or whatever timm reads                              |
| folder     | a folder of class folders: what is in it, and what is left out                               |
| coco       | images with boxes and masks in COCO's layout, and average precision                          |
| pixels     | images of PIL in the bits and channels that a model takes                                    |
| order      | which samples come when, and with which random numbers                                       |
| digits     | the embedded default: scikit-learn's digits                                                  |
| shapes     | a small synthetic set for detection                                                          |
"""
