"""Folders of Hugging Face's transformers, in and out.

Layer: above the rest of checkpoint/, but for restoring and the manager.
"""
