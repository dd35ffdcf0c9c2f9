"""The trainer, what it is built from, and what watches it."""
