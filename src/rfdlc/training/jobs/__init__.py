"""Trainings in run folders, on their way.

A job and the lanes that jobs travel on (`job.py`), the loop driven for a stack of them, with histories and checkpoints
(`driving.py`), calibration and the one look at test labels (`finishing.py`), which jobs may share a stack or its
beginning (`sharing.py`), and Ctrl-C (`stopping.py`).
What users call is above: `training/fitting.py` and `training/many.py`.
"""
