"""The [comm] table."""

from typing import Annotated

from torchtitan_lite.config.tables.section import Section, above, at_least, only


class CommConfig(Section):
    """Time limits of collectives and the flight recorder."""

    init_timeout_seconds: Annotated[float, above(0)] = 300
    """Time limit of a collective until the first step has ended (seconds)."""
    train_timeout_seconds: Annotated[float, above(0)] = 100
    """Time limit of a collective after the first step (seconds)."""
    trace_buf_size: Annotated[int, at_least(0)] = 20000
    """Entries of the flight recorder, which records a rank's collectives; 0 switches it off. With
    `fault_tolerance.enable` it is written if a rank hangs, with NCCL also if a collective times
    out. It costs some 15 microseconds per collective."""
    save_traces_folder: str = "comm_traces"
    """Folder of the flight recorder's files, below `job.dump_folder`."""
    save_traces_file_prefix: str = "rank_"
    """Prefix of the flight recorder's files."""
    mode: Annotated[str, only("default", "a simulated communication mode")] = "default"
    """"default": real communication."""
