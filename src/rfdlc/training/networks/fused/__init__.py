"""Residual stages of many small networks at once, forward and backward by hand: what a
GPU trains CIFAR stacks with.
"""
