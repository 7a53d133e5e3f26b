"""Judges of :func:`diagnose`: each reads a subject and yields lines."""
