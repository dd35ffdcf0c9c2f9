"""Imports without garbage collection."""

import gc
import sys

import pytest

from torchtitan_lite.core.imports import imports_without_gc


def test_collection_is_off_in_the_block_only() -> None:
    with pytest.raises(RuntimeError), imports_without_gc():
        assert not gc.isenabled()
        raise RuntimeError
    assert gc.isenabled()


def test_objects_are_exempt_after_an_import_only(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    with imports_without_gc():
        pass
    assert not frozen
    with imports_without_gc():
        monkeypatch.setitem(sys.modules, "imported", sys)
    assert frozen
