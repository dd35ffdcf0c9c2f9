"""Paths and URLs that users give."""

from pathlib import Path

import pytest

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.registry import REGISTRY
from torchtitan_lite.core.urls import is_url, join_location, local_path, split


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("outputs/run", "outputs/run"),
        ("/data/run", "/data/run"),
        ("run:1", "run:1"),
        ("runs/a:/b", "runs/a:/b"),
        ("./s3:run", "./s3:run"),
        ("./sqlite:/tmp/x", "./sqlite:/tmp/x"),
        ("file:///data/run", "/data/run"),
        ("s3://bucket/run", None),
        ("simplecache::s3://bucket/run", None),
    ],
)
def test_a_path_is_local_and_a_url_is_not(location: str, path: str | None) -> None:
    assert local_path(location) == (None if path is None else Path(path))
    assert is_url(location) == ("://" in location)


@pytest.mark.parametrize(
    ("location", "wanted"),
    [
        ("s3:bucket/run", "write s3://bucket/run, or ./s3:bucket/run for a folder"),
        ("gs:/bucket", "write gs://bucket, or"),
        ("file:/data", "write file:///data, or"),
        ("vault:run", "write vault://run, or ./vault:run for a folder"),
        ("sqlite:/tmp/x.db", r"write \./sqlite:/tmp/x\.db for a folder .* such as .*, s3, .*vault"),
    ],
)
def test_a_url_without_slashes_is_not_taken_for_a_folder(
    location: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REGISTRY.storages, "vault", object)
    for read in (local_path, is_url, split):
        with pytest.raises(ConfigError, match=wanted):
            read(location)


@pytest.mark.parametrize(
    ("folder", "location"),
    [
        (".", "./step-1"),
        ("run", "run/step-1"),
        ("/", "/step-1"),
        ("/data/run", "/data/run/step-1"),
        ("file:///", "file:///step-1"),
        ("file:///data", "file:///data/step-1"),
        ("s3://bucket", "s3://bucket/step-1"),
        ("simplecache::s3://bucket/run", "simplecache::s3://bucket/run/step-1"),
    ],
)
def test_a_location_is_its_folder_and_a_name(folder: str, location: str) -> None:
    assert join_location(folder, "step-1") == location
    assert split(location) == split(f"{location}/") == (folder, "step-1")


def test_a_name_alone_is_in_the_working_folder_and_in_the_root_of_a_filesystem() -> None:
    assert split("step-1") == (".", "step-1")
    assert split("memory://step-1") == ("memory://", "step-1")
    assert join_location("/data/", "step-1") == "/data/step-1"
