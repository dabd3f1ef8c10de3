"""Normaliser: bytes or features on a device -> numbers that a network takes, in one multiplication and addition."""

import torch
from torch import Tensor

from rfdlc.data.dataset import Normalisation
from rfdlc.errors import InputError


class Normaliser:
    """`x * scale + shift` over samples (..., channels, H, W) on the scale 0..255, or features (..., F)."""

    def __init__(
        self, normalisation: Normalisation | None, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> None:
        channels, images = shape[0], len(shape) == 3
        mean, std = (normalisation.mean, normalisation.std) if normalisation else ((0.0,) * channels, (1.0,) * channels)
        if len(mean) != channels or len(std) != channels:
            what = "channels" if images else "features"
            raise InputError(f"the normalisation has {len(mean)} values, but the samples have {channels} {what}")
        spread = torch.tensor(std, dtype=torch.float64)
        scale = 1 / (spread * (255 if images else 1))  # bytes are brought to 0..1 first
        shift = -torch.tensor(mean, dtype=torch.float64) / spread
        place = (channels, 1, 1) if images else (channels,)
        self._scale = scale.float().view(place).to(device)
        self._shift = shift.float().view(place).to(device)
        self._dtype = dtype

    def __call__(self, inputs: Tensor) -> Tensor:
        """Normalised, in the type asked for."""
        return (inputs * self._scale).add_(self._shift).to(self._dtype)
