"""What replicas must have in common, and what each may have its own."""

from typing import Any

import pytest

from torchtitan_lite.config import Config, config_fingerprint


def _with(key: str, value: Any) -> Config:
    section, _, name = key.partition(".")
    return Config.model_validate({section: {name: value}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.lr", 1e-3),
        ("lr_scheduler.warmup_steps", 3),
        ("training.steps", 3),
        ("training.local_batch_size", 3),
        ("training.max_norm", 0.5),
        ("training.corpora", [{"dataset": "python_stdlib", "weight": 2.0}]),
        ("debug.seed", 1),
        ("anomalies.spike_factor", 3.0),
        ("checkpoint.interval", 3),
        ("fault_tolerance.bucket_mib", 1),
        ("fault_tolerance.sync_steps", 2),
        # All ranks of all replicas decide about a step by the same flags.
        ("fault_tolerance.state_check", True),
        ("parallelism.tensor_parallel_degree", 2),
    ],
)
def test_what_changes_the_result_must_not_differ(key: str, value: Any) -> None:
    assert config_fingerprint(_with(key, value), 2) != config_fingerprint(Config(), 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("job.dump_folder", "/elsewhere"),
        ("model.hf_assets_path", "/elsewhere"),
        ("training.cache_folder", "/elsewhere"),
        ("metrics.log_freq", 3),
        ("debug.seed", 0),
        ("debug.sample_ledger", True),
        ("fault_tolerance.replica_id", 3),
        ("fault_tolerance.group_size", 3),
        ("fault_tolerance.hang_timeout_s", 3.0),
    ],
)
def test_what_belongs_to_a_machine_may_differ(key: str, value: Any) -> None:
    assert config_fingerprint(_with(key, value), 2) == config_fingerprint(Config(), 2)


def test_paths_of_corpora_may_differ_and_ranks_must_not() -> None:
    one, other = (
        _with("training.corpora", [{"dataset": "python_stdlib", "dataset_path": path}])
        for path in ("/a", "/b")
    )
    assert config_fingerprint(one, 2) == config_fingerprint(other, 2) != config_fingerprint(one, 4)
    assert ":" not in config_fingerprint(one, 2)


def test_the_fingerprint_does_not_change_with_a_release() -> None:
    # Replicas of two releases may train together. A new key that matters changes this on purpose.
    assert config_fingerprint(Config(), 4) == "4-3076ce0ad2fd"
