"""Predictions of any number of samples, as one file."""
