"""The process beside a trainer that writes snapshots to storage, and its handle in the trainer.

Layer: above memory and storage. Standard library and xxhash only.
"""
