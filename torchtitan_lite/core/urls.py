"""Locations that users give: paths of this machine, and URLs of what fsspec opens."""

import re
from pathlib import Path

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.registry import REGISTRY

_SCHEMES = (
    *("abfs", "abfss", "adl", "az", "file", "ftp", "gcs", "gs", "hdfs", "hf", "http", "https"),
    *("memory", "oci", "oss", "r2", "s3", "s3a", "sftp", "webhdfs"),
)
"""Schemes of URLs that fsspec opens and users write; registered ones are in REGISTRY. They serve
`is_url` to reject `s3:bucket`: without `//` it would name a folder. `file` is one of them because
`file:/path` is a mistake, too; of its URLs `local_path` returns the path."""
_WITHOUT_SLASHES = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/?)(?!/)(.*)")


def is_url(location: str) -> bool:
    """Whether a location is a URL.

    Raises ConfigError for a URL without "//", which would otherwise name a folder: a known scheme
    and a colon, or any name with a colon and one slash.
    """
    if wrong := _WITHOUT_SLASHES.fullmatch(location):
        scheme, slash, rest = wrong.groups()
        known = sorted({*_SCHEMES, *REGISTRY.storages})
        if scheme in known:
            start = f"{scheme}:///" if scheme == "file" else f"{scheme}://"
            raise ConfigError(
                f'"{location}" is not a URL: write {start}{rest}, or ./{location} for a folder of '
                "that name."
            )
        if slash:
            raise ConfigError(
                f'"{location}" is not a URL: write ./{location} for a folder of that name, or '
                f"SCHEME://PATH with a scheme such as {', '.join(known)}."
            )
    return "://" in location


def local_path(location: str) -> Path | None:
    """Return the path that a location names, also as file://PATH; None for any other URL. Raises as
    `is_url`."""
    if is_url(location) and not location.startswith("file://"):
        return None
    return Path(location.removeprefix("file://"))


def join_location(folder: str, name: str) -> str:
    """Return the location of `name` in a folder or at a URL."""
    start, mark, path = folder.rpartition("://")
    return f"{start}{mark}{path.rstrip('/')}/{name}"


def split(location: str) -> tuple[str, str]:
    """Return the folder or the URL that a location is in, and its name there. Raises as
    `is_url`."""
    is_url(location)
    start, mark, path = location.rpartition("://")
    folder, _, name = path.rstrip("/").rpartition("/")
    # The parent of a folder directly below "/" is "/".
    folder = folder or ("/" if path.startswith("/") else "" if mark else ".")
    return f"{start}{mark}{folder}", name
