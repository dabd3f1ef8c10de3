"""K networks as one module, which knows nothing of how it is trained.

Layers (`stack.py`) and their operations (`operations.py`), backbones made of them (`backbones.py`), and `ParticleNet`:
a trunk, branches and heads (`particles.py`), whose outputs a combination joins (`combinations.py`). `fused/` makes
small residual networks fast on a GPU.
"""
