"""From probabilities to actions, and what they are worth. Needs numpy and scipy
alone.
"""
