"""A stack of runs in training.

One step, captured on a GPU (`step.py`), the loop over epochs as a generator (`loop.py`), and what every run of the
stack has of its own (`per_run.py`). Nothing here knows a run folder, a source of data or the screen: whoever drives the
loop does.
"""
