"""An HTTP server for one model: batching, bounded resources, and metrics that show
drift.
"""
