"""Estimators and scorers for scikit-learn."""
