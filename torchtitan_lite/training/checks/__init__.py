"""Checks of a configuration against the model and the mesh."""
