"""Adapters are merged into the weights that they were trained with."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite.checkpoint import frozen_weights
from torchtitan_lite.checkpoint.frozen_weights import FrozenBase, MergedSnapshot, open_merged
from torchtitan_lite.checkpoint.snapshots import SavedValues
from torchtitan_lite.core.errors import CheckpointError


@pytest.mark.parametrize("found", ["1f", "2e"])
def test_adapters_are_not_merged_into_other_weights(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    recorded = FrozenBase(path="/base", fingerprint="1f", scale=2.0)
    base = SimpleNamespace(fingerprint=lambda: found, tensors={})
    monkeypatch.setattr(frozen_weights, "recorded_base", lambda adapters: recorded)
    monkeypatch.setattr(frozen_weights, "open_parent_storage", lambda path: (None, path))
    monkeypatch.setattr(frozen_weights, "open_snapshot", lambda storage, name, spec: base)
    saved = SavedValues(step=1, values={}, rng={}, mesh={}, model_only=False)
    adapters: Any = SimpleNamespace(where="/adapters", tensors={}, saved=saved)
    spec: Any = None
    if found == "1f":
        assert isinstance(open_merged(adapters, spec, "/moved"), MergedSnapshot)
        return
    with pytest.raises(CheckpointError, match=r"fingerprint 1f.*/moved holds others \(2e\)"):
        open_merged(adapters, spec, "/moved")


def test_adapters_are_loaded_onto_their_own_weights_only() -> None:
    base = FrozenBase(path="/base", fingerprint="1f", scale=2.0)
    base.check(replace(base, path="/moved").to_json())
    with pytest.raises(CheckpointError, match="belong to the weights in /base"):
        base.check(replace(base, fingerprint="2e").to_json())
