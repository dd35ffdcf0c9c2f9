"""The [metrics] table.

Names and meanings are those of torchtitan 0.2.2. `metrics.jsonl` has no switch: every run
writes it.
"""

from typing import Annotated

from torchtitan_lite.schema.section import Section, at_least


class MetricsConfig(Section):
    """Where the numbers of each step go. `metrics.jsonl` is always written, one line a step."""

    log_freq: Annotated[int, at_least(1)] = 10
    """Write to the console, TensorBoard and Weights & Biases every this many steps."""
    enable_tensorboard: bool = False
    """Write TensorBoard files."""
    disable_color_printing: bool = False
    """Print without colors. The environment variable NO_COLOR does the same."""
    save_tb_folder: str = "tb"
    """Folder of the TensorBoard files, below `job.dump_folder`."""
    save_for_all_ranks: bool = False
    """Write the files of every rank, not only of the leader. The leader's keep their names, the
    others' end in the rank."""
    enable_wandb: bool = False
    """Send the metrics to Weights & Biases. Needs the package wandb."""
