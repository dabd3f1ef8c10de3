"""K networks as one module: layers, backbones made of them, and `ParticleNet`, whose
outputs a combination joins.
"""
