"""Keys and sections of torchtitan, mostly of earlier versions, that have another name here or none.

A key that only moved to another section under its old name needs no entry: the message for an
unknown key finds it there. Layer: imports nothing of the project.
"""

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
"""What to add when one of these values of a key is refused."""
