"""Where samples come from: sources (numpy), and loaders that feed a device (torch)."""
