"""Examples, each with a README."""
