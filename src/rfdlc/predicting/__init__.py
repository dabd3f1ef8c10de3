"""Predictions and features of any number of samples."""
