"""All kinds of faults, by name. Layer: above all files of faults."""

from torchtitan_lite.chaos import network_faults, process_faults, state_faults

KINDS = {**process_faults.KINDS, **state_faults.KINDS, **network_faults.KINDS}
