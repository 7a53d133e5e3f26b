"""Judges of :func:`diagnose`: each reads a fit and yields lines."""
