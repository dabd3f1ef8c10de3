"""The networks themselves: K of them as one module, which knows nothing of how it is trained.

Layers of a stack (`stack.py`, `hidden.py`), backbones made of them (`backbones.py`), and `ParticleNet`: a trunk,
branches and heads (`particles.py`), whose outputs a combination joins (`combinations.py`). What makes them quick or
small is here too: `fused/`, `products.py`, `recompute.py`. Processes are known where they share statistics
(`shared_norm.py`).
"""
