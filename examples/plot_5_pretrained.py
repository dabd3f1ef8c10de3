"""
Start from a pretrained network
===============================

Rare classes have few images, and a network that has seen other images needs fewer.
Usually it comes from timm: ``rfdlc train photos/ --out runs/a backbone=timm:resnet50
pretrained=hub``. Here, where nothing is downloaded, a small network is trained on
digits 0 to 4 first, and then used for the digits 5 to 9, of which some are rare.
"""

# %%
# The first task: digits 0 to 4
# -----------------------------
# Any torch module that maps a batch to features can be a backbone. This one is trained
# with a plain loop.
import tempfile

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import rfdlc

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images = (images * 15.9).astype(np.uint8).reshape(-1, 1, 8, 8)


def network() -> nn.Module:
    convolutions = [
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
    ]
    return nn.Sequential(
        *convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU()
    )


first = labels < 5
body, head = network(), nn.Linear(64, 5)
x, y = (
    torch.tensor(images[first] / 255.0, dtype=torch.float32),
    torch.tensor(labels[first]),
)
x = (x - x.mean()) / x.std()
optimiser = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=2e-3)
loss = torch.tensor(torch.nan)
for _epoch in range(5):
    for rows in torch.randperm(len(y)).split(64):
        loss = nn.functional.cross_entropy(head(body(x[rows])), y[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
print(f"loss on digits 0 to 4: {loss.item():.3f}")

# %%
# The second task: digits 5 to 9, long-tailed
# -------------------------------------------
# Between 24 and 3 training images per class, and 100 test images of each.
rng = np.random.default_rng(0)
train, test = [], []
for digit, count in zip(range(5, 10), (24, 14, 8, 5, 3), strict=True):
    rows = rng.permutation(np.flatnonzero(labels == digit))
    train += list(rows[:count])
    test += list(rows[-100:])
splits = {
    name: rfdlc.Split(images[rows], labels[rows] - 5)
    for name, rows in {"train": train, "test": test}.items()
}
data = rfdlc.Dataset.of("digits 5 to 9", ["5", "6", "7", "8", "9"], splits)

# %%
# Train with and without the pretrained weights
# ---------------------------------------------
# A module as ``backbone`` starts every particle (every network of the ensemble) from a
# copy of it. A function starts from random weights.
lengths = (10, 20, 40)
settings = {
    "batch_size": 16,
    "shared_stages": 0,
    "target_prior": "uniform",
    "augment": "none",
}
accuracy = {}
for name, backbone in {"random weights": network, "pretrained": body}.items():
    for epochs in lengths:
        model = rfdlc.train(
            data,
            out=tempfile.mkdtemp() + "/run",
            backbone=backbone,
            epochs=epochs,
            **settings,
        )
        found = rfdlc.evaluate(model.predict(data), decider=model.decider)
        accuracy[name, epochs] = found.accuracy
        print(
            f"{name:14} {epochs} epochs: accuracy {found.accuracy:.1%}, calibration"
            f" error {found.ece:.1%}"
        )

# %%
# The pretrained network needs fewer epochs. Digits are easy: with enough of them,
# random weights get as far.
figure, axis = plt.subplots(figsize=(7, 3))
for name in ("random weights", "pretrained"):
    axis.plot(
        lengths, [100 * accuracy[name, epochs] for epochs in lengths], "o-", label=name
    )
axis.set(xlabel="epochs", ylabel="accuracy on balanced test images (%)", xticks=lengths)
axis.legend(frameon=False)
figure.tight_layout()
plt.show()
