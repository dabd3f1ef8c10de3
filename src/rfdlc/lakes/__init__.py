"""Tables of any size, on all cores or on a cluster."""
