"""The data files that a `dataset_path` names.

Invariant: files are sorted; what a folder holds beside its data, and files of other splits, are not
read.
"""

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from torchtitan_lite.config.tables.data import DEFAULT_DATASET, CorpusConfig
from torchtitan_lite.core.errors import DataError
from torchtitan_lite.core.log import logger, warn_on_rank_0
from torchtitan_lite.data.row_files import readable

FORMATS = {
    "json": (".json", ".jsonl", ".ndjson"),
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "text": (".txt", ".text", ".md"),
}
"""File extensions searched in a folder. A file given by name may have any."""
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip")
_METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
"""Files that `save_to_disk` and repositories of data sets hold beside the data."""
_STATE = "state.json"
"""The same, but only beside the others and Arrow files: it may be data, such as of states."""
_CARDS = {"README.md", "LICENSE.md", "LICENSE.txt"}
"""The same, but not among documents."""
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Names of splits in names of files and folders, as `datasets` reads them."""
_SPLIT_OF = {name: split for split, names in _SPLITS.items() for name in names}
_SHARD = r"[-_.]\d+[-_.]of[-_.]\d+(?:[-_.][0-9a-f]+)?"
_SPLIT_NAME = re.compile(rf"(?:.*[-_. ])?({'|'.join(_SPLIT_OF)})(?:{_SHARD}|[-_. ]?\d+)?")
"""A split alone, or as `datasets` writes it: behind the name of the data set, before a number."""


def local_files(config: CorpusConfig, known: Sequence[str]) -> tuple[str, tuple[Path, ...]]:
    """Return the format and the sorted files of `config.dataset_path`. `known` are the data sets
    whose name may be given beside it. Raises DataError."""
    dataset, dataset_path = config.dataset, str(config.dataset_path)
    format_name = dataset if dataset in FORMATS else None
    if format_name is None and dataset not in (DEFAULT_DATASET, *known):
        raise DataError(
            f'dataset = "{dataset}" names a data set on the hub and dataset_path = '
            f'"{dataset_path}" names local files. Leave dataset out, or set it to the format of '
            f"the files: {', '.join(FORMATS)}."
        )
    path = Path(dataset_path).expanduser().absolute()
    if path.is_dir():
        extensions = FORMATS[format_name] if format_name else tuple(sum(FORMATS.values(), ()))
        files = _of_split(path, _in_folder(path, extensions), config.dataset_split)
    else:
        matches = [path] if path.is_file() else map(Path, glob.glob(str(path), recursive=True))
        files = sorted(file for file in matches if file.is_file())
    if not files:
        kind = f" with the extensions {', '.join(FORMATS[format_name])}" if format_name else ""
        raise DataError(
            f'dataset_path = "{dataset_path}" (that is, {path}) matches no file{kind}. Name a '
            f"file, a folder or a glob; a relative path is taken from the working directory."
        )
    return format_name or _format_of(dataset_path, files), tuple(files)


def _in_folder(folder: Path, extensions: Sequence[str]) -> list[Path]:
    """Return the data files below a folder: neither hidden ones, nor metadata, nor the results that
    `datasets` caches there."""
    files = []
    for file in sorted(folder.rglob("*")):
        parts = file.relative_to(folder).parts
        is_hidden = any(part.startswith((".", "__")) for part in parts)
        is_cache = file.name.startswith("cache-") and file.suffix == ".arrow"
        if _extension(file) not in extensions or is_hidden or is_cache:
            continue
        if file.is_symlink() and not file.exists():
            raise DataError(
                f"{file}: a link to {file.readlink()}, which does not exist. Restore the file, or "
                "remove the link."
            )
        if file.is_file():
            files.append(file)
    return _without_metadata(folder, files)


def _without_metadata(folder: Path, files: list[Path]) -> list[Path]:
    saved = {file.parent for file in files if file.name in _METADATA or file.suffix == ".arrow"}
    metadata = [
        file
        for file in files
        if file.name in _METADATA or (file.name == _STATE and file.parent in saved)
    ]
    data = [file for file in files if file not in metadata]
    if any(_extension(file) not in FORMATS["text"] for file in data):
        metadata += [file for file in data if file.name in _CARDS]
    if not metadata:
        return files
    names = ", ".join(str(file.relative_to(folder)) for file in metadata)
    logger.info("%s: metadata of data sets is not read: %s", folder, names)
    return [file for file in files if file not in metadata]


def _of_split(folder: Path, files: list[Path], split: str) -> list[Path]:
    """Return the files of one split if the names are those of several. Raises DataError if files
    without a split would be left out."""
    _report_configurations(folder)
    names = {file: _split_of(file.relative_to(folder)) for file in files}
    splits = {name for name in names.values() if name is not None}
    are_documents = all(_extension(file) in FORMATS["text"] for file in files)
    if are_documents or len(splits) < 2:
        words = set().union(*(_split_words(str(file.relative_to(folder))) for file in files))
        if len(splits if are_documents else words) > 1:
            # Names of documents are titles, in which such words are usual.
            warn_on_rank_0(
                "%s: some names look like those of splits (%s), but all %d files are read: "
                "dataset_split applies to names such as train.jsonl and train-00000-of-00003."
                "parquet, and not to text files. Set dataset_path to a glob to read fewer.",
                folder,
                ", ".join(sorted(splits | words)),
                len(files),
            )
        return files
    without = next((file for file, name in names.items() if name is None), None)
    if without is not None:
        raise DataError(
            f'dataset_path = "{folder}" has files of the splits {", ".join(sorted(splits))}, and '
            f"{without.relative_to(folder)}, whose name has none of them. Set dataset_path to a "
            "glob of the files to read, or name each file after its split."
        )
    wanted = _SPLIT_OF.get(split, split)
    if wanted not in splits:
        raise DataError(
            f'dataset_path = "{folder}" has files of the splits {", ".join(sorted(splits))}, but '
            f'dataset_split = "{split}". Set dataset_split to one of them, or dataset_path to a '
            "glob."
        )
    chosen = [file for file, name in names.items() if name == wanted]
    logger.info(
        "%s: %d files of the split %s are read, and %d others are not (dataset_split)",
        folder,
        len(chosen),
        wanted,
        len(files) - len(chosen),
    )
    return chosen


def _report_configurations(folder: Path) -> None:
    readme = folder / "README.md"
    if not readme.is_file():
        return
    with readable(readme):
        card = readme.read_bytes()
    if re.match(rb"---\s(.*\s)?configs:\s", card, re.DOTALL):
        warn_on_rank_0(
            "%s defines configurations, which are not read: all files of %s are one corpus, of one "
            "split if their names are those of several. Set dataset_path to the files to read.",
            readme,
            folder,
        )


def _split_of(file: Path) -> str | None:
    """Return the split of a relative path: the one that its innermost name is of."""
    uncompressed = file.with_suffix("") if file.suffix.lower() in _COMPRESSED else file
    stem = uncompressed.stem
    for name in (stem, *reversed(file.parts[:-1])):
        if match := _SPLIT_NAME.fullmatch(name):
            return _SPLIT_OF[match[1]]
    # Splits may have further names, such as train_sft: before the number of a shard they are meant.
    sharded = re.fullmatch(rf"(.+?){_SHARD}", stem)
    return sharded[1] if sharded and _split_words(sharded[1]) else None


def _split_words(name: str) -> set[str]:
    return {_SPLIT_OF[word] for word in re.split(r"[-._ /0-9]+", name) if word in _SPLIT_OF}


def _format_of(dataset_path: str, files: Sequence[Path]) -> str:
    formats: dict[str, str] = {}
    for file in files:
        extension = _extension(file)
        formats[extension] = next(
            (f for f, extensions in FORMATS.items() if extension in extensions), ""
        )
    if len(set(formats.values())) != 1 or "" in formats.values():
        raise DataError(
            f'the files of dataset_path = "{dataset_path}" have the extensions '
            f"{', '.join(repr(extension) for extension in sorted(formats))}, from which the format "
            f"does not follow. Set dataset to one of {', '.join(FORMATS)}."
        )
    return next(iter(formats.values()))


def _extension(file: Path) -> str:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""
