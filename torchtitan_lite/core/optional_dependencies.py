"""Optional dependencies, and the extra of the package that installs each."""

from importlib.util import find_spec

from torchtitan_lite.core.errors import UserError

EXTRAS = {
    "google.protobuf": "ft",
    "grpc": "ft",
    "plotly": "report",
    "prometheus_client": "prometheus",
    "s3fs": "s3",
    "torchao": "float8",
    "torchft": "ft",
    "vllm": "vllm",
    "wandb": "wandb",
}
"""Extras by import name. Versions are in `[project.optional-dependencies]` of pyproject.toml."""

_DISTRIBUTIONS = {"google.protobuf": "protobuf", "grpc": "grpcio"}
"""Names on PyPI that differ from the import name."""


def missing(package: str, needed_by: str) -> str | None:
    """Return the error for a feature whose optional `package` is not installed, or None if it
    is. Imports nothing."""
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:
        # The parent of a dotted name is not installed.
        spec = None
    # A folder of that name in the working directory is a namespace package without a file.
    if spec is not None and spec.origin is not None:
        return None
    name = _DISTRIBUTIONS.get(package, package)
    return (
        f"{needed_by} needs the package {name}, which is not installed. Run pip install {name}, or "
        f"install torchtitan_lite with the extra [{EXTRAS[package]}]."
    )


def require(package: str, needed_by: str) -> None:
    """Raise UserError if the optional `package` is not installed. Imports nothing."""
    if error := missing(package, needed_by):
        raise UserError(error)
