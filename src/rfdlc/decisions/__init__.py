"""From probabilities to actions."""
