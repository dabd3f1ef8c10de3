"""The methods that `rfdlc.train` knows, and what is needed to add one."""

from rfdlc.training.methods import METHODS, Method, Option, Stage

__all__ = ["METHODS", "Method", "Option", "Stage"]
