"""Developer commands, run as `python -m scripts.NAME`."""
