"""How particles are trained: losses, stacks of networks, methods, one loop, the run
folder.
"""
