"""The paper's tables and ours: grids of runs, what they measured, and the published
values beside it.
"""
