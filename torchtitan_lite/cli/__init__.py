"""Commands of torchtitan-lite. Layer: the top."""
