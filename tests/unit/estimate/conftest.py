"""Flavors that a test registers do not outlive it."""

import pytest

from torchtitan_lite.models import llama3, qwen3


@pytest.fixture(autouse=True)
def own_flavors(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in (llama3, qwen3):
        monkeypatch.setattr(family, "FLAVORS", dict(family.FLAVORS))
