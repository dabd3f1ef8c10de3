"""What tests of objectives share: double precision, and a sample of logits."""

import pytest
import torch


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def sample():
    """Logits (3, 6, 4) of three particles, and targets (6,)."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(3, 6, 4, generator=generator)
    return logits, torch.tensor([0, 0, 1, 2, 3, 1])
