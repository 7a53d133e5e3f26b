"""Room: particles."""

__all__: list[str] = []
