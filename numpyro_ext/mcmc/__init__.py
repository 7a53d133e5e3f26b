"""Room: mcmc."""

__all__: list[str] = []
