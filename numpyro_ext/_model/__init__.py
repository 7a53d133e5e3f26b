"""The reading of NumPyro programs: no other part of the package traces a model or a guide."""
