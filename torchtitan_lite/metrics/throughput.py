"""Arithmetic on speeds: pure functions. Layer: imports nothing of the project."""


def mfu(
    flops_per_token: float, tokens_per_second: float, peak_flops: float | None, num_devices: int
) -> float | None:
    """Return the model FLOPs utilization, 0 to 1: the fraction of the devices' peak that the
    model's own arithmetic uses, without recomputation (Chowdhery et al. 2022, appendix B).

    `tokens_per_second` is the total of all devices, `peak_flops` (FLOP/s) that of one. None if that
    is None.
    """
    if peak_flops is None:
        return None
    return flops_per_token * tokens_per_second / (peak_flops * num_devices)
