"""Check that the two symbolic links of the package survived the checkout.

`torchtitan_lite/models` and `torchtitan_lite/checkpoint` are links to the folders of the same name
at the top of the repository. Git checks them out as small text files if links are disabled
(core.symlinks = false), and some archivers drop them; the resulting import error would name a
missing module instead of the cause.
"""

from pathlib import Path

LINKED_FOLDERS = ("models", "checkpoint")


def require_links(package: Path = Path(__file__).parents[1]) -> None:
    """Raise ImportError with the remedy if one of the linked folders is not a folder."""
    lost = [name for name in LINKED_FOLDERS if not (package / name / "__init__.py").is_file()]
    if lost:
        links = " ".join(f"torchtitan_lite/{name}" for name in lost)
        raise ImportError(
            f"This checkout lost its symbolic links: {links} should point to "
            f"{', '.join('../' + name for name in lost)}. Restore them with "
            f"`git config core.symlinks true && git checkout -- {links}`, or on a system without "
            "symbolic links install the wheel."
        )


def refuse_other_name(module_name: str) -> None:
    """Raise ImportError if a linked package is imported under a name other than its own.

    The same files imported as `models` and as `torchtitan_lite.models` would be two sets of modules
    with two registries.
    """
    if not module_name.startswith("torchtitan_lite."):
        raise ImportError(
            f"Import this package as torchtitan_lite.{module_name}, not as {module_name}: "
            "the folder at the top of the repository is linked into the package."
        )
