import jax
import pytest


@pytest.fixture
def quick_compile():
    """For tests whose time is that of the compiler: the same programs, not optimised."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
