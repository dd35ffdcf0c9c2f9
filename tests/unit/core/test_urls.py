"""Paths and URLs that users give."""

from pathlib import Path

import pytest

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.urls import is_url, local_path


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("outputs/run", "outputs/run"),
        ("/data/run", "/data/run"),
        ("run:1", "run:1"),
        ("./s3:run", "./s3:run"),
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
    ],
)
def test_a_url_without_slashes_is_not_taken_for_a_folder(location: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        local_path(location)
