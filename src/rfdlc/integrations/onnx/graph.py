"""The whole way as one torch module: raw samples -> normalised -> particles -> decisions."""

from copy import deepcopy

import torch
from torch import Tensor, nn

from rfdlc.data.loader import Normaliser
from rfdlc.decide.utility import Utility
from rfdlc.integrations.onnx.head import DecisionHead
from rfdlc.training.model import Model


class DecisionGraph(nn.Module):
    """uint8 images (B, channels, H, W) or float features (B, F) -> what DecisionHead gives.

    The utility is a constant of the graph, or the second input. `half` computes the networks in 16 bits; the
    decisions are always computed in 32.
    """

    def __init__(self, model: Model, utility: Utility, *, resize: bool = False, half: bool = False) -> None:
        super().__init__()
        self.kind = torch.float16 if half else torch.float32
        self.net = deepcopy(model.net).to("cpu", self.kind).eval()
        self.fit = CentreSquare(model.input_shape[1], model.centre) if resize else nn.Identity()
        self.normalise = Normaliser(model.normalisation, model.input_shape, torch.device("cpu"), self.kind)
        with torch.no_grad():  # particles may be combined inside the network
            said = self.net(torch.zeros(1, 2, *model.input_shape, dtype=self.kind))  # (1, M, 2, C)
        self.head = DecisionHead(model.decider, said.shape[1])
        self.register_buffer("utility", torch.tensor(utility.matrix, dtype=torch.float32))
        self.utility: Tensor

    def forward(self, inputs: Tensor, utility: Tensor | None = None) -> tuple[Tensor, ...]:
        samples = self.normalise(self.fit(inputs.to(torch.float32)))
        logits = self.net(samples.unsqueeze(0))[0].float()  # (M, B, C)
        return self.head(logits, self.utility if utility is None else utility)


class CentreSquare(nn.Module):
    """Images (B, channels, H, W) of any size -> their centre square at `size`, as pillow resizes it (bilinear).

    The square has `share` of the shorter side; images that have the size already are samples, and stay as they are.
    Two products with matrices of triangle weights, made from the size of the images that come: across, then down,
    each rounded to whole levels.
    """

    def __init__(self, size: int, share: float = 1.0) -> None:
        super().__init__()
        self.size, self.share = size, share

    def forward(self, images: Tensor) -> Tensor:
        height, width = (torch.scalar_tensor(side, dtype=torch.float32) for side in images.shape[-2:])
        ready = (height == self.size) & (width == self.size)
        side = torch.where(ready, 1.0, self.share) * torch.minimum(height, width)
        across = self._triangles(torch.arange(images.shape[-1]), width, side)
        down = self._triangles(torch.arange(images.shape[-2]), height, side)
        return _whole(down @ _whole(images @ across.T))

    def _triangles(self, pixels: Tensor, length: Tensor, side: Tensor) -> Tensor:
        """(size, length): how much each pixel counts for each of the new ones."""
        step = side / self.size
        centres = (torch.arange(self.size) + 0.5) * step + (length - side) / 2
        distance = (pixels.to(torch.float32) + 0.5 - centres[:, None]).abs()
        triangles = (1 - distance / step.clamp_min(1)).clamp_min(0)
        return triangles / triangles.sum(1, keepdim=True)


def _whole(levels: Tensor) -> Tensor:
    """Rounded half up; a little more than a half, so that runtimes which add in another order agree on ties."""
    return (levels + 0.501).floor().clamp(0, 255)
