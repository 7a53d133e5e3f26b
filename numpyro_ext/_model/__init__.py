"""How the package reads a NumPyro program: nothing else in it traces a model or a guide."""
