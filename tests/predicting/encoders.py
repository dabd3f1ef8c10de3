"""Networks of a user's own, found as tests.predicting.encoders:FUNCTION."""

import torch
from torch import nn


def corners() -> nn.Module:
    """Features that a test can compute by hand: the mean of each channel in the left
    and in the right half.
    """
    return Corners()


class Corners(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 1, bias=False)
        nn.init.eye_(self.first.weight.data[:, :, 0, 0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        x = self.first(x)
        return torch.cat(
            [x[..., :half].mean((2, 3)), x[..., half:].mean((2, 3))], dim=1
        )


def random() -> nn.Module:
    """Weights that it draws itself."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


def images_out() -> nn.Module:
    return nn.Conv1d(3, 4, 1)
