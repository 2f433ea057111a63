"""A small convolutional network for handwritten digits.

After pytorch/examples mnist: https://github.com/pytorch/examples/tree/main/mnist
"""

from torch import nn


class Net(nn.Sequential):
    """Two convolutions and two linear layers, for images (B, 1, 28, 28)."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
            *(nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
        )
