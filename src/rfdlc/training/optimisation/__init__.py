"""What happens to weights, in plain tensors and numbers.

The update of a step (`optimisers.py`), the learning rate of an epoch (`schedules.py`), and means, draws and new heads
between steps (`averaging.py`). Which of it a training uses is said above, by settings and stages.
"""
