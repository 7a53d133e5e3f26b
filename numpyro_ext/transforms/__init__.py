"""Room: transforms."""

__all__: list[str] = []
