"""Judges of :func:`diagnose`: each reads a context and yields lines."""
