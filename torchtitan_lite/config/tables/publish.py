"""`[publish]`."""

from typing import Annotated, Literal

from torchtitan_lite.config.tables.section import Section, above, at_least, between


class PublishConfig(Section):
    """Publication of the weights of a live run to subscribers, such as inference engines."""

    enable: bool = False
    """Publish the weights in shared memory."""
    every_steps: Annotated[int, above(0)] = 1
    """Committed steps between two versions. A version has the number of its step."""
    at_start: bool = False
    """Also publish the weights with which the run starts or resumes, as the version of their step:
    0 for initial weights. Samplers of reinforcement learning need them before the first step."""
    dtype: Literal["bfloat16", "float32", "float64"] | None = None
    """Dtype of published floating-point weights. Unset: as they are trained."""
    keep_versions: Annotated[int, at_least(1)] = 2
    """Complete versions in shared memory, beside the one being written."""
    when_in_use: Literal["skip", "wait"] = "skip"
    """If subscribers read all older versions when the next one is due: "skip" it, or let training
    "wait" for them."""
    max_wait_s: Annotated[float, above(0)] = 30.0
    """Limit of a wait, less than comm.train_timeout_seconds. A version is skipped afterwards."""
    address: str | None = None
    """Interface at which each rank serves its part to other machines, which needs
    TORCHTITAN_LITE_TOKEN: its name, which is valid on every machine, or its address. Unset: only
    to this machine, through shared memory."""
    port: Annotated[int, between(0, 65535)] = 0
    """Port of the first rank's server, the URL of which subscribers use. 0: any free one, as
    `published.json` in the output folder tells, and another one after a restart."""
    deltas: bool = False
    """Also serve what has changed since the last `keep_versions` versions, element by element.
    Subscribers on other machines receive it instead of shards where it is smaller, with the same
    result; few elements change with dtype "bfloat16" and a small learning rate. Each rank compares
    every version with the one before, and needs memory for the changes: at most `keep_versions`
    times its published shards."""
