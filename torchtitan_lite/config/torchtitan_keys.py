"""torchtitan's configuration: keys and defaults of 0.2.2, keys of earlier versions with another
name here or none, and features that are not supported here.

`tests/unit/config/test_torchtitan_defaults.py` compares the defaults with
`tests/assets/torchtitan_defaults.json`, which has all of them. A key that only moved to another
section under its old name needs no entry: the message for an unknown key finds it there.
"""

from collections.abc import Mapping
from typing import Any

from torchtitan_lite.config.keys import text_at
from torchtitan_lite.config.tables.job import BUILT_IN_CONFIG_MODULES, CONFIG_MODULE_KEYS
from torchtitan_lite.config.tables.section import toml_literal

VERSION = "0.2.2"

DEFAULTS: dict[str, Any] = {
    "model.hf_assets_path": "./tests/assets/tokenizer",
    "training.dataset": "c4_test",
    "training.mixed_precision_param": "bfloat16",
    "validation.dataset": "c4_validation",
    "validation.seq_len": 2048,
    "checkpoint.enable_first_step_checkpoint": False,
    "checkpoint.last_save_model_only": True,
    "checkpoint.async_mode": "disabled",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": ["moe.router.gate"],
    "fault_tolerance.process_group_timeout_ms": 10000,
}
"""Defaults of shared keys where they differ. The reference lists them."""

KEYS = {
    "job": "config_file dump_folder description print_config save_config_file custom_config_module",
    "profiling": (
        "enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup "
        "enable_memory_snapshot save_memory_snapshot_folder"
    ),
    "metrics": (
        "log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks "
        "enable_wandb"
    ),
    "model": "name flavor hf_assets_path tokenizer_path converters print_after_conversion",
    "optimizer": "name lr beta1 beta2 eps weight_decay implementation early_step_in_backward",
    "lr_scheduler": "warmup_steps total_steps decay_ratio decay_type min_lr_factor",
    "training": (
        "dataset dataset_path local_batch_size global_batch_size seq_len max_norm steps "
        "enable_cpu_offload dtype mixed_precision_param mixed_precision_reduce gc_freq gc_debug"
    ),
    "training.dataloader": "num_workers persistent_workers pin_memory prefetch_factor",
    "parallelism": (
        "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward "
        "tensor_parallel_degree disable_loss_parallel enable_async_tensor_parallel "
        "pipeline_parallel_degree module_fqns_per_model_part "
        "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers "
        "pipeline_parallel_layers_per_stage pipeline_parallel_schedule "
        "pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size "
        "pipeline_parallel_expert_parallel_overlap context_parallel_degree "
        "context_parallel_load_balancer context_parallel_rotate_method expert_parallel_degree "
        "expert_tensor_parallel_degree expert_parallel_comm_backend"
    ),
    "checkpoint": (
        "enable enable_ft_dataloader_checkpoints folder interval initial_load_path "
        "initial_load_model_only initial_load_in_hf initial_load_in_hf_quantized "
        "last_save_model_only last_save_in_hf export_dtype async_mode keep_latest_k load_step "
        "exclude_from_loading enable_first_step_checkpoint create_seed_checkpoint load_only"
    ),
    "activation_checkpoint": (
        "mode selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop "
        "memory_budget visualize_memory_budget_pareto preserve_rng_state determinism_check "
        "debug"
    ),
    "compile": "enable components backend",
    "quantize.linear.float8": (
        "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp recipe_name "
        "filter_fqns emulate"
    ),
    "quantize.linear.mx": "mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns",
    "quantize.grouped_mm.float8": "fqns",
    "quantize.grouped_mm.mx": "recipe_name fqns",
    "comm": (
        "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder "
        "save_traces_file_prefix mode"
    ),
    "memory_estimation": "enable disable_fake_mode",
    "fault_tolerance": (
        "enable process_group process_group_timeout_ms replica_id group_size min_replica_size "
        "semi_sync_method sync_steps should_quantize fragment_sync_delay fragment_update_alpha "
        "module_fqns_per_model_fragment num_fragments"
    ),
    "experimental": "custom_import custom_args_module",
    "validation": "enable dataset dataset_path local_batch_size seq_len freq steps",
    "validation.dataloader": "num_workers persistent_workers pin_memory prefetch_factor",
    "debug": "seed deterministic deterministic_warn_only moe_force_load_balance",
}
"""All keys by table, separated by spaces. [fault_tolerance] includes the keys that
`torchtitan.components.ft.config` adds."""

ROUTER_BIAS_UPDATE_RATE = 1e-3
"""`load_balance_coeff` of every flavor."""


RENAMED_KEYS = {
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "experimental.pipeline_parallel_microbatches": "parallelism.pipeline_parallel_microbatch_size",
    "experimental.custom_model_path": "experimental.custom_import",
    "job.custom_args_module": "job.custom_config_module",
    "job.print_args": "job.print_config",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "memory_estimation.enabled": "memory_estimation.enable",
    "metrics.enable_color_printing": "metrics.disable_color_printing",
    "metrics.rank_0_only": "metrics.save_for_all_ranks",
    "model.attn_mask_type": "model.attention_mask",
    "model.tokenizer_path": "model.hf_assets_path",
    "model.use_flex_attn": "model.attention_backend",
    "optimizer.foreach": "optimizer.implementation",
    "optimizer.fused": "optimizer.implementation",
    "parallelism.pipeline_parallel_microbatches": "parallelism.pipeline_parallel_microbatch_size",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.enable_loss_parallel": "parallelism.disable_loss_parallel",
}

RENAMED_NOTES = {
    "experimental.pipeline_parallel_microbatches": "it counts samples, not microbatches",
    "lr_scheduler.lr_min": "it is a share of optimizer.lr, as before",
    "metrics.enable_color_printing": "its meaning is turned round",
    "metrics.rank_0_only": "its meaning is turned round",
    "model.attn_mask_type": '"block_causal" is now "document"',
    "model.tokenizer_path": "it is a folder that holds tokenizer.json",
    "model.use_flex_attn": 'true is now "flex"',
    "optimizer.foreach": 'true is now "foreach"',
    "optimizer.fused": 'true is now "fused", false is "foreach" or "for-loop"',
    "parallelism.pipeline_parallel_microbatches": "it counts samples, not microbatches",
    "training.enable_loss_parallel": "its meaning is turned round",
}

REMOVED_KEYS = {
    "checkpoint.interval_type": "checkpoint.interval always counts steps",
    "experimental.enable_compiled_autograd": "compiled autograd is not supported",
    "experimental.pipeline_parallel_split_points": "the layers are split evenly over the stages",
    "float8.enable_float8_linear": "float8 is chosen by model.converters = "
    '["quantize.linear.float8"]',
    "job.config_file": "it exists on the command line only, as --config FILE",
    "job.use_for_integration_test": "nothing reads it",
    "model.norm_type": "each model family has one kind of norm",
    "parallelism.enable_compiled_autograd": "compiled autograd is not supported",
    "parallelism.pipeline_parallel_split_points": "the layers are split evenly over the stages",
}

RENAMED_SECTIONS = {
    "float8": "quantize.linear.float8",
    "mx": "quantize.linear.mx",
}

VALUE_NOTES = {
    "model.converters": {
        "float8": 'It is a name of an earlier torchtitan, now "quantize.linear.float8".',
        "mx": "MX formats are not supported.",
        "quantize.linear.mx": "MX formats are not supported.",
        "quantize.grouped_mm.mx": "MX formats are not supported.",
        "quantize.grouped_mm.float8": "float8 is supported for linear layers only.",
    },
}
"""Hints for unsupported values."""


_TEXT_ONLY = "only text models can be trained"
_MODELS = {
    "flux": f"image generation (Flux) is not supported; {_TEXT_ONLY}",
    "vlm": f"vision-language models are not supported; {_TEXT_ONLY}",
    "transformers_modeling_backend": (
        "modules of transformers are not supported. To train a model that config.json of a Hugging "
        'Face folder describes, set model.flavor = "hf" and model.hf_assets_path, and leave out '
        "model.name and [hf_transformers]"
    ),
}
_EXPERIMENTS = ("simple_fsdp", "compiler_toolkit", "autoparallel", "auto_parallel")
"""Experiments of torchtitan that name a model `experiment.family`."""


def unsupported_feature(
    tables: Mapping[str, Any],
) -> tuple[tuple[str, str], str] | None:
    """Return the key that requests an unsupported feature of torchtitan, and the problem; None if
    no key does. One such line says more than a list of all its unknown keys."""
    name = text_at(tables, ("model", "name"))
    experiment, _, family = name.partition(".")
    problem = _MODELS.get(name)
    if family and experiment in _EXPERIMENTS:
        problem = (
            f"the experiment {experiment} of torchtitan is not supported. Set model.name = "
            f"{toml_literal(family)}"
        )
    if problem is not None:
        return ("model", "name"), f"model.name = {toml_literal(name)}: {problem}."
    for section, key in CONFIG_MODULE_KEYS:
        module = text_at(tables, (section, key))
        if module.startswith("torchtitan.") and module not in BUILT_IN_CONFIG_MODULES:
            return (section, key), (
                f"{section}.{key} = {toml_literal(module)} has the keys of a feature of torchtitan "
                "that is not supported. Leave it out, with its keys. Accepted is "
                f"{', '.join(map(toml_literal, BUILT_IN_CONFIG_MODULES))}."
            )
    return None
