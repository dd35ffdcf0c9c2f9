"""A lighthouse: where replicas find each other, and what they hear when one of them has gone.

It answers torchft's managers (0.2.0) as torchft's own lighthouse does, and can in addition be told
that a replica has left. Layer: imports errors and log only, and no torch.
"""
