"""From raw samples to decisions as one torch module: resize -> normalise -> particles -> decide."""

from copy import deepcopy

import numpy as np
import torch
from torch import Tensor, nn

from rfdlc.data.loader import Normaliser
from rfdlc.decide.decider import Decider
from rfdlc.decide.scores import PROBABILITY_FLOOR
from rfdlc.integrations.onnx.model import check_rule
from rfdlc.training.model import Model


class DecisionGraph(nn.Module):
    """uint8 images (B, channels, H, W) or float features (B, F) -> the outputs of DecisionHead.

    The utility is a constant of the graph, or its second input (C, A) in 64 bits. `half` computes the networks in
    16 bits; decisions are always computed in 32.
    """

    def __init__(self, model: Model, *, resize: bool = False, half: bool = False) -> None:
        super().__init__()
        self.kind = torch.float16 if half else torch.float32
        self.net = deepcopy(model.net).to("cpu", self.kind).eval()
        self.fit = CentreSquare(model.input_shape[1], model.centre) if resize else nn.Identity()
        self.normalise = Normaliser(model.normalisation, model.input_shape, torch.device("cpu"), self.kind)
        with torch.no_grad():  # particles may be combined inside the network
            logits = self.net(torch.zeros(1, 2, *model.input_shape, dtype=self.kind))  # (1, M, 2, C)
        self.head = DecisionHead(model.decider, logits.shape[1])

    def forward(self, inputs: Tensor, utility: Tensor | None = None) -> tuple[Tensor, ...]:
        samples = self.normalise(self.fit(inputs.to(torch.float32)))
        return self.head(self.net(samples.unsqueeze(0))[0].float(), utility)


class DecisionHead(nn.Module):
    """The torch twin of Decider: particle logits (M, B, C) -> the outputs in the order of OUTPUTS.

    Calibration is the affine map W log p + b of the Decider's calibrator. `uncertainty` is the entropy of the
    probabilities over log C, `mutual_information` the disagreement of the particles in nats (0 for one particle).
    """

    def __init__(self, decider: Decider, particles: int) -> None:
        super().__init__()
        check_rule(decider)
        self.mean_logits = decider.combine == "mean-logits" or particles == 1  # one particle's logits are kept
        weights = np.full(particles, 1 / particles) if decider.weights is None else decider.weights
        slope, bias = decider.fitted.as_affine() if decider.fitted else (1.0, 0.0)
        ratio = decider.ratio()
        ratio = np.ones(len(decider.utility.classes)) if ratio is None else ratio
        self.weights, self.slope, self.bias, self.ratio = (
            nn.Buffer(torch.tensor(values, dtype=torch.float32))
            for values in (weights.reshape(-1, 1, 1), slope, bias, ratio)
        )
        self.utility, self.common = map(nn.Buffer, centred(torch.tensor(decider.utility.matrix)))

    def forward(self, logits: Tensor, utility: Tensor | None = None) -> tuple[Tensor, ...]:
        matrix, common = (self.utility, self.common) if utility is None else centred(utility)
        each = logits.softmax(-1)  # (M, B, C)
        combined = (logits * self.weights).sum(0) if self.mean_logits else _safe_log((each * self.weights).sum(0))
        corrected = (self._scaled(combined) + self.bias).softmax(-1) * self.ratio
        probabilities = corrected / corrected.sum(-1, keepdim=True)  # (B, C)
        gains = probabilities @ matrix  # (B, A)
        expected = gains + (probabilities @ common)[:, None]
        uncertainty = _entropy(probabilities) / float(np.log(max(2, probabilities.shape[-1])))
        disagreement = (_entropy(each.mean(0)) - _entropy(each).mean(0)).clamp_min(0)
        return probabilities, expected, gains.argmax(-1), uncertainty, disagreement

    def _scaled(self, combined: Tensor) -> Tensor:
        """W log p (B, C), where W is a number, (C,) or (C, C); a number needs no normalised log p."""
        if not self.slope.ndim:
            return combined * self.slope
        log_p = combined.log_softmax(-1)
        return log_p * self.slope if self.slope.ndim == 1 else log_p @ self.slope.T


def centred(utility: Tensor) -> tuple[Tensor, Tensor]:
    """A utility (C, A) in 64 bits as what differs between actions (C, A) and what they share (C,), in 32 bits.

    What all actions of a row share does not change a decision, but in 32 bits it would cost the digits that do.
    """
    low, high = utility.amin(1), utility.amax(1)
    common = torch.minimum(torch.maximum(torch.zeros_like(low), low), high)
    return (utility - common[:, None]).float(), common.float()


class CentreSquare(nn.Module):
    """Images (B, channels, H, W) of any size -> their centre square at `size`, resized as pillow does (bilinear).

    The square has `share` of the shorter side; images that have the size already are left as they are. Two products
    with matrices of triangle weights: along the width, then the height, each rounded to integers.
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
        return _rounded(down @ _rounded(images @ across.T))

    def _triangles(self, pixels: Tensor, length: Tensor, side: Tensor) -> Tensor:
        """(size, length): the weight of each pixel in each of the new ones."""
        step = side / self.size
        centres = (torch.arange(self.size) + 0.5) * step + (length - side) / 2
        distance = (pixels.to(torch.float32) + 0.5 - centres[:, None]).abs()
        triangles = (1 - distance / step.clamp_min(1)).clamp_min(0)
        return triangles / triangles.sum(1, keepdim=True)


def _rounded(levels: Tensor) -> Tensor:
    """Half up; by a little more than a half, so that runtimes which add in another order agree on ties."""
    return (levels + 0.501).floor().clamp(0, 255)


def _safe_log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp_min(PROBABILITY_FLOOR).log()


def _entropy(probabilities: Tensor) -> Tensor:
    return -(probabilities * _safe_log(probabilities)).sum(-1)
