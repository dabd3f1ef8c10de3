"""From the scores of any model to calibrated probabilities for a class prior."""
