"""Room: targets."""

__all__: list[str] = []
