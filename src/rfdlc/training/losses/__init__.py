"""What is minimised: small modules that map logits, targets and the epoch to one number.

The integrated gain term by term (`gain.py`), objectives of methods whose particles are experts (`experts.py`), and what
pushes particles apart (`repulsion.py`). They hold numbers, not settings:
`training/factories.py` makes them from settings.
"""
