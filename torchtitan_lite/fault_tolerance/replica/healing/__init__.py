"""Healing: transfer of the live state from an up-to-date replica into a lagging one, as safetensors
over HTTP.

Nothing received is unpickled; every chunk is checksummed, and served only to peers with the token.
"""

from torchtitan_lite.fault_tolerance.replica.healing.transport import HealingTransport, HealSource

__all__ = ["HealSource", "HealingTransport"]
