"""One file that decides: ONNX, torch.export and MLflow."""
