"""The table of particles."""

import jax.numpy as jnp

from numpyro_ext.particles import print_particles


def test_table_has_a_line_for_each_element(capsys):
    w = jnp.arange(12.0).reshape(3, 2, 2)
    print_particles({"w": w, "scale": jnp.array([1.0, 2.0, 6.0])}, prob=0.5)
    lines = capsys.readouterr().out.splitlines()
    names = ["w[0,0]", "w[0,1]", "w[1,0]", "w[1,1]"]
    assert [line.split()[0] for line in lines] == ["3", *names, "scale"]
    assert lines[-1].split()[1:] == ["3.00", "2.16", "2.00", "1.50", "4.00"]
