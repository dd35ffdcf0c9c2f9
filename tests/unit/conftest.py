"""Flavors that a test registers do not outlive it."""

import pytest

from torchtitan_lite.models import families, family


@pytest.fixture(autouse=True)
def own_flavors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in families():
        module = family(name)
        monkeypatch.setattr(module, "FLAVORS", dict(module.FLAVORS))
