"""Available memory according to cgroups, versions 1 and 2."""

from pathlib import Path

import pytest

from torchtitan_lite.checkpoint.shared_memory import region_file
from torchtitan_lite.checkpoint.shared_memory.region_file import InsufficientMemory, check_capacity

_MIB = 1 << 20
_NO_LIMIT = 0x7FFFFFFFFFFFF000
"""Files of version 1."""


def _group(folder: Path, limit: object, used: int, cache: int, names: tuple[str, str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"active_file 5\n{names[2]} {cache}\n")


_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(region_file, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(region_file, "_OWN_CGROUP", tmp_path / "own")
    return tmp_path / "cgroup"


def test_the_tightest_limit_of_all_ancestors_counts(cgroups: Path) -> None:
    (cgroups.parent / "own").write_text("0::/job/step\n")
    _group(cgroups / "job" / "step", "max", 60 * _MIB, 0, _V2)
    _group(cgroups / "job", 100 * _MIB, 70 * _MIB, 10 * _MIB, _V2)
    assert region_file._cgroup_available() == 40 * _MIB
    with pytest.raises(InsufficientMemory, match="cgroup has 40.0 MiB available"):
        check_capacity(cgroups.parent, 41 * _MIB, "A snapshot")


def test_version_1_is_supported(cgroups: Path) -> None:
    (cgroups.parent / "own").write_text("12:pids:/\n5:cpu,memory:/docker/abc\n0::/\n")
    _group(cgroups / "memory" / "docker" / "abc", 50 * _MIB, 45 * _MIB, _MIB, _V1)
    _group(cgroups / "memory", _NO_LIMIT, 999 * _MIB, 0, _V1)
    assert region_file._cgroup_available() == 6 * _MIB


def test_a_container_whose_group_looks_like_the_root(cgroups: Path) -> None:
    (cgroups.parent / "own").write_text("5:memory:/docker/abc\n")
    _group(cgroups / "memory", 50 * _MIB, 45 * _MIB, 0, _V1)
    assert region_file._cgroup_available() == 5 * _MIB


@pytest.mark.parametrize("own", ["", "0::/nowhere\n", "no cgroups here\n"])
def test_no_limit(cgroups: Path, own: str) -> None:
    (cgroups.parent / "own").write_text(own)
    assert region_file._cgroup_available() is None
