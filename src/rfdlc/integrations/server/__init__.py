"""A server: one model behind HTTP, with batches, limits and figures that show drift."""
