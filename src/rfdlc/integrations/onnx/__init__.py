"""One file: a run folder as an ONNX or torch.export graph that goes from raw inputs to
actions.
"""
