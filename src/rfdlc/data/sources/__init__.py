"""One small file a format: each reads what is on disk into a Dataset, and needs no torch."""
