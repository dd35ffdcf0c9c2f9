"""What the system tells of reading from disks."""

from pathlib import Path


def read_bytes() -> int:
    """That this process has had read from disks."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0
