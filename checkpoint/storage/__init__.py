"""Where checkpoints lie: files, folders and object stores, and what makes a step whole.

Layer: above errors. Standard library and xxhash only; fsspec is imported for URLs.
"""
