"""Conversion from and to Hugging Face folders and torch DCP checkpoints."""
