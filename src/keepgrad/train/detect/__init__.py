"""Detection and instance segmentation.

| file       | what                                                                                         |
| ---        | ---                                                                                          |
| task       | the detection task that the loop trains, on data in COCO's layout                            |
| detectors  | Mask R-CNN and Cascade Mask R-CNN on timm backbones                                          |
| cascade    | the heads of Cascade R-CNN                                                                   |
"""

from .detectors import Detector, detector
from .task import Batch, Detection

__all__ = ["Batch", "Detection", "Detector", "detector"]
