"""A recurrent network that reads a handwritten digit row by row.

After pytorch/examples mnist_rnn: https://github.com/pytorch/examples/tree/main/mnist_rnn
"""

from torch import Tensor, nn


class Net(nn.Module):
    """An LSTM over the rows of images (B, 1, 28, 28), and two linear layers of its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(28, 64, batch_first=True)
        self.head = nn.Sequential(
            *(nn.BatchNorm1d(64), nn.Dropout(0.25), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10))
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, 10)."""
        return self.head(self.rnn(images.squeeze(1))[0][:, -1])
