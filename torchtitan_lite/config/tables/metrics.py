"""The [metrics] table.

Names and meanings are those of torchtitan 0.2.2. `metrics.jsonl` has no switch: every run
writes it.
"""

from typing import Annotated

from pydantic import AfterValidator

from torchtitan_lite.config.tables.section import Section, at_least, at_most


def _has_text(text: str) -> str:
    if not text.strip():
        # An empty address means all interfaces to a socket.
        raise ValueError('must be an address, such as "127.0.0.1", got ""')
    return text


_not_empty = AfterValidator(_has_text)


class MetricsConfig(Section):
    """Metrics of each step. `metrics.jsonl` is always written, one line per step."""

    log_freq: Annotated[int, at_least(1)] = 10
    """Steps between outputs to the console, TensorBoard and Weights & Biases."""
    enable_tensorboard: bool = False
    """Write TensorBoard files."""
    disable_color_printing: bool = False
    """Print without colors. The environment variable NO_COLOR does the same."""
    save_tb_folder: str = "tb"
    """Folder of the TensorBoard files, below `job.dump_folder`."""
    save_for_all_ranks: bool = False
    """Write files of every rank, not only of the leader; names of other ranks end in the rank."""
    enable_wandb: bool = False
    """Send the metrics to Weights & Biases. Needs the package wandb."""
    prometheus_port: Annotated[int, at_least(0), at_most(65535)] = 0
    """Port for Prometheus, which scrapes the newest values at /metrics; 0: off. The leader of
    replica k listens on this port + k; with `save_for_all_ranks`, rank r listens on this port + k *
    ranks per replica + r. Needs the package prometheus_client."""
    prometheus_host: Annotated[str, _not_empty] = "127.0.0.1"
    """Address of the interface for Prometheus. There is no password: choose a private one."""
