"""Room: diagnostics."""

__all__: list[str] = []
