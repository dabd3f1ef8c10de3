"""Intervals, rates and rankings."""
