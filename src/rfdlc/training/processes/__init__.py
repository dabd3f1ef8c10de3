"""Several processes that are one training.

Who each is and the sums over all of them (`group.py`), how they find one another under `torchrun` (`meeting.py`), and a
batch of which each has a share (`whole.py`). With one process every function gives back what it got, so that no other
room has to ask. The ground of this package: it knows no other room of it.
"""
