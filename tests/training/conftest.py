"""What tests of training share: double precision, a sample of logits, and steps that
take simulated time.
"""

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


@pytest.fixture
def simulated_steps(monkeypatch):
    """A function of a clock [now], of the seconds of a network's step, and of what to
    note of each measured network.

    Budgets are then measured on this clock, and nothing is trained.
    """
    from rfdlc.training import measuring

    def simulate(clock, seconds_of, note):
        def steps(net, stages, state, show):
            note(net)
            for _ in range(100):
                clock[0] += seconds_of(net)
                show(1, "")
            yield

        monkeypatch.setattr(measuring, "epochs", steps)
        monkeypatch.setattr(
            "rfdlc.training.trainer.Trainer.fit", lambda self, runs: runs
        )
        monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    return simulate
