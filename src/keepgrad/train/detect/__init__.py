"""Detection and instance segmentation.

| file       | what                                                                                         |
| ---        | ---                                                                                          |
| task       | detection on data in COCO's layout, as a task of the loop                                    |
| detectors  | Mask R-CNN and Cascade Mask R-CNN on backbones of timm                                       |
| cascade    | the heads of Cascade R-CNN                                                                   |
"""

from .detectors import Detector, detector
from .task import Batch, Detection

__all__ = ["Batch", "Detection", "Detector", "detector"]
