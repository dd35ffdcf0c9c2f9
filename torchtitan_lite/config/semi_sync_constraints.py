"""What training with averages every few steps asks of the rest of a config. Layer: above schema."""

from collections.abc import Iterator

from torchtitan_lite.config.mesh_constraints import on_gpu
from torchtitan_lite.config.schema import Config
from torchtitan_lite.schema.section import toml_literal


def semi_sync_problems(config: Config) -> Iterator[str]:
    """Why `fault_tolerance.semi_sync_method` cannot be had with this config."""
    section = config.fault_tolerance
    method = section.semi_sync_method
    asked = f"fault_tolerance.semi_sync_method = {toml_literal(method)}"
    if method != "streaming_diloco":
        yield from _only_streaming(config)
    if method is None:
        return
    if not section.enable:
        yield f"{asked} averages replicas. Set fault_tolerance.enable = true."
    if section.world_size_mode == "fixed_with_spares":
        yield (
            f'{asked} has no replicas that stand by. Set world_size_mode = "constant_batch" or '
            '"dynamic".'
        )
    if config.model.router_bias_update_rate:
        yield (
            f"{asked} does not average the biases of routers. Set "
            "model.router_bias_update_rate = 0."
        )
    # Each replica judges its own loss, and none may go back alone.
    anomalies = {"on_non_finite": "skip", "on_spike": "off"}
    for key, needed in anomalies.items():
        if (given := getattr(config.anomalies, key)) == "roll_back":
            yield f'anomalies.{key} = "{given}" does not go with {asked}. Set it to "{needed}".'
    rounds = config.training.global_batch_size // config.training.local_batch_size
    shares = section.world_size_mode == "constant_batch" and config.training.global_batch_size > 0
    if shares and section.group_size > rounds:
        yield (
            f"{asked} gives each replica some of every step, and training.global_batch_size "
            f"({config.training.global_batch_size}) has {rounds} rounds of local_batch_size for "
            f"fault_tolerance.group_size = {section.group_size} replicas. Raise it, or set "
            'world_size_mode = "dynamic".'
        )
    if section.replay_check:
        yield f"fault_tolerance.replay_check does not go with {asked}. Set it to false."
    if section.should_quantize and not on_gpu(config):
        yield "fault_tolerance.should_quantize = true needs a GPU. Set it to false."
    fragments = section.num_fragments if method == "streaming_diloco" else 1
    every, rest = divmod(section.sync_steps, fragments)
    if rest:
        yield (
            f"fault_tolerance.sync_steps ({section.sync_steps}) is no multiple of num_fragments "
            f"({fragments}). Set it to {section.sync_steps - rest + fragments}."
        )
        return
    if section.fragment_sync_delay >= every:
        yield (
            f"fault_tolerance.fragment_sync_delay ({section.fragment_sync_delay}) has to be below "
            f"the {every} steps from one fragment to the next (sync_steps / num_fragments)."
        )
    # At other steps each replica has weights of its own.
    lengths = {"training.steps": (config.training.steps, section.sync_steps)}
    if config.checkpoint.enable:
        lengths["checkpoint.interval"] = (config.checkpoint.interval, every)
    for key, (given, unit) in lengths.items():
        if given % unit:
            yield (
                f"{key} ({given}) is no multiple of {unit}, the steps from one average to the next "
                f"({asked}). Set it to {given - given % unit + unit}."
            )


def _only_streaming(config: Config) -> Iterator[str]:
    section = config.fault_tolerance
    keys = {"num_fragments": 1, "fragment_sync_delay": 0, "fragment_update_alpha": 0.0}
    for key, off in keys.items():
        if (given := getattr(section, key)) != off:
            # torchtitan runs DiLoCo with several fragments as Streaming DiLoCo.
            streaming = (
                'Set semi_sync_method = "streaming_diloco", which torchtitan means by "diloco" '
                f"with fragments, or {key} = {toml_literal(off)}."
            )
            remedy = streaming if section.semi_sync_method == "diloco" else ""
            yield (
                f"fault_tolerance.{key} = {toml_literal(given)} has no effect without "
                f'semi_sync_method = "streaming_diloco". '
                f"{remedy or f'Set it to {toml_literal(off)}.'}"
            )
