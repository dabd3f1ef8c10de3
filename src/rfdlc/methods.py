"""The methods that `rfdlc.train` knows, and what is needed to add one."""

from rfdlc.training.methods import METHODS, Method, Stage

__all__ = ["METHODS", "Method", "Stage"]
