"""Room: scores."""

__all__: list[str] = []
