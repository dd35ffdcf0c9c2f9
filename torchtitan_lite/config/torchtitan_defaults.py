"""Defaults of torchtitan 0.2.2 where ours differ, as its config module has them.

The reference prints them beside ours. Layer: imports nothing of the project.
"""

VERSION = "0.2.2"

DEFAULTS = {
    "model.hf_assets_path": "./tests/assets/tokenizer",
    "training.dataset": "c4_test",
    "training.mixed_precision_param": "bfloat16",
    "validation.dataset": "c4_validation",
    "validation.seq_len": 2048,
    "checkpoint.last_save_model_only": True,
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": ["moe.router.gate"],
}
