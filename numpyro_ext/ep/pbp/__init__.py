"""Probabilistic backpropagation for rectifier networks."""
