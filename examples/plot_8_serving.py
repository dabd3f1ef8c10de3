"""
Serve decisions over HTTP
=========================

``rfdlc serve`` answers requests with decisions. Every request may bring its own
utility: costs belong to the customer, not to the model.
"""

# %%
# A model and a server
# --------------------
# The server is a process of its own: ``rfdlc serve runs/a --port 8000``. Here Python
# starts it, on a free port.
import socket
import subprocess
import sys
import tempfile
import time

import matplotlib.pyplot as plt
import numpy as np

import rfdlc

model = rfdlc.train("digits-lt", out=tempfile.mkdtemp() + "/run")
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
command = [sys.executable, "-m", "rfdlc", "serve", str(model.path), "--port", str(port)]
server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
client = rfdlc.Client(f"http://127.0.0.1:{port}")
for _second in range(60):
    if client.ready():
        break
    time.sleep(1)

# %%
# Ask for decisions
# -----------------
# Images as arrays; image files and rows of tables work as well.
images = rfdlc.load("digits-lt").splits["test"].array
answer = client.decide(arrays=images[:5])
for action, probability, worth in zip(
    answer["action"], answer["probability"], answer["expected_utility"], strict=True
):
    print(f"{action}  (probability {probability:.2f}, expected utility {worth:.2f})")

# %%
# The same images with other costs, for this request alone:
careful = rfdlc.Utility.tail_sensitive(model.classes, penalty=-1).with_abstain(0.8)
print(
    client.decide(arrays=images[:50], utility=careful)["action"].count("abstain"),
    "of 50 are handed over",
)

# %%
# The server decides as the library does:
served = client.decide(arrays=images[:200])["action"]
assert served == [model.classes.names[a] for a in model.decide(images[:200])]

# %%
# How long does an answer take?
# -----------------------------
took = []
for row in range(200):
    began = time.perf_counter()
    client.decide(arrays=images[row : row + 1])
    took.append(1000 * (time.perf_counter() - began))

figure, axis = plt.subplots(figsize=(7, 3))
axis.hist(took, bins=40, color="#4477aa", range=(0, np.quantile(took, 0.98)))
axis.set(xlabel="milliseconds per request, one client, one image", ylabel="requests")
figure.tight_layout()
plt.show()

# %%
# SIGTERM ends the server after the requests that it has accepted.
server.terminate()
ended = server.wait(30)
