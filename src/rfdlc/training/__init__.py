"""How particles are trained: stacks of networks, objectives, methods as rows, one loop, the run folder."""
