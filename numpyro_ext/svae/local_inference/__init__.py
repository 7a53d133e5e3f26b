"""Rules that make the local part of q from expected statistics and potentials."""
