"""Room: objectives."""

__all__: list[str] = []
