"""The rows of a corpus: local files, a data set of the hub, read through the `datasets` library, or
a registered data set.

Resolves the files or the hub data set of a `CorpusConfig`, and reports errors of reading them.
Invariant: `open_corpus` and the fingerprint of local files do not import `datasets`, so that a
start with a warm token cache is fast.
"""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_lite.config.tables.data import DEFAULT_DATASET, CorpusConfig
from torchtitan_lite.core.errors import DataError
from torchtitan_lite.core.registry import REGISTRY
from torchtitan_lite.data.local_files import FORMATS, local_files
from torchtitan_lite.data.row_files import Position, Row, read_rows, readable

_C4_SPLITS = {"c4": "train", "c4_validation": "validation", "c4_test": "train"}
_ROWS_PER_READ = 256


class RowStream(NamedTuple):
    """Rows of a corpus from a position on."""

    rows: Iterator[Row]
    state: Callable[[], dict[str, Any]]
    """Returns JSON values from which `Corpus.rows` continues behind the last row."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus whose files exist; nothing has been read yet."""

    name: str
    """Its name in messages."""
    fingerprint: str
    """Changes if the documents may have changed."""
    column: str
    is_chat: bool
    """Whether `column` holds conversations, not texts."""
    format: str | None
    """"json", "parquet", "arrow" or "text" for local files, else None."""
    files: tuple[Path, ...]
    hub_name: str | None
    hub_config: str | None
    split: str
    streaming: bool
    max_unusable_fraction: float
    reader: Callable[[], Iterable[Any]] | None = None
    """Reader of a registered data set."""

    def rows(self, columns: Collection[str], state: Mapping[str, Any] | None = None) -> RowStream:
        """Return the rows from `state` on, by default all, with those of `columns` that exist.
        Raises DataError for what cannot be read, here and in reading."""
        if self.hub_name is not None:
            return self._hub_rows(columns, state)
        position = _position(state)

        def read() -> Iterator[Row]:
            nonlocal position
            for following, row in self._local_rows(columns, position):
                position = following
                yield row

        return RowStream(read(), lambda: {"file": position[0], "row": position[1]})

    def _local_rows(
        self, columns: Collection[str], start: Position
    ) -> Iterator[tuple[Position, Row]]:
        if self.reader is not None:
            values = islice(self.reader(), start[1], None)
            for number, value in enumerate(values, start=start[1] + 1):
                yield (0, number), Row(f"{self.name}, row {number}", {self.column: value})
            return
        self.check_not_empty()
        files = self.files
        if self.name == DEFAULT_DATASET:
            files = tuple(file for file in files if _is_utf8(file))
        yield from read_rows(files, str(self.format), columns, start)

    def _hub_rows(self, columns: Collection[str], state: Mapping[str, Any] | None) -> RowStream:
        import datasets

        load: Any = datasets.load_dataset
        with _reading(self.name):
            dataset = load(
                self.hub_name, self.hub_config, split=self.split, streaming=self.streaming
            )
            names = dataset.column_names
            if names is None:
                names = list(next(iter(dataset.take(1)), {self.column: ""}))
            self._check_column(names)
            dataset = dataset.select_columns([name for name in names if name in columns])
            if not self.streaming:
                return RowStream(self._read(dataset.iter(_ROWS_PER_READ), names), dict)
            if state is not None:
                dataset.load_state_dict(dict(state))
        batches = ({name: [value] for name, value in row.items()} for row in dataset)
        since = "" if state is None else " since the resume"
        return RowStream(self._read(batches, names, since), dataset.state_dict)

    def _read(
        self, batches: Iterator[dict[str, list[Any]]], names: list[str], since: str = ""
    ) -> Iterator[Row]:
        """Yield the rows of batches, by column, of `datasets`. `since` says where rows are counted
        from, if not from the first."""
        number = 0
        while True:
            with _reading(self.name):
                batch = next(batches, None)
            if batch is None:
                return
            for values in zip(*batch.values(), strict=True):
                number += 1
                row = dict(zip(batch, values, strict=True))
                yield Row(f"{self.name}, row {number}{since}", row, columns=names)

    def check_not_empty(self) -> None:
        """Raise DataError if all local files are empty."""
        if any(_status(file).st_size for file in self.files):
            return
        first, number = self.files[0], len(self.files)
        empty = f"{first} is empty" if number == 1 else f"all {number} files are empty"
        raise DataError(
            f'dataset_path = "{self.name}": {empty} (0 bytes), but a corpus needs at least one '
            "document. Write documents to it, or set dataset_path to another file."
        )

    def _check_column(self, names: list[str]) -> None:
        if self.column not in names:
            remedy = (
                "messages_column to the one with the messages"
                if self.is_chat
                else "text_column to the one with the text, or messages_column to one of "
                "conversations"
            )
            raise DataError(
                f"{self.name} has no column {self.column!r}; its columns are "
                f"{', '.join(map(repr, names)) or 'none'}. Set {remedy}."
            )


def open_corpus(config: CorpusConfig) -> Corpus:
    """Open the corpus in `config`. Raises DataError if it does not exist, or has no documents."""
    if config.dataset in REGISTRY.online_datasets:
        raise DataError(f'"{config.dataset}" is an online data set, which has no documents.')
    format, files, hub_name, hub_config, split = None, (), None, config.dataset_config, ""
    is_chat = config.messages_column is not None
    column = config.text_column if config.messages_column is None else config.messages_column
    if config.dataset_path is not None:
        format, files = local_files(config, tuple(_C4_SPLITS))
    elif config.dataset in REGISTRY.datasets:
        return _registered(config, column, is_chat=is_chat)
    elif config.dataset == DEFAULT_DATASET:
        format, files = "text", _standard_library_files()
        column = column if is_chat else "text"
    elif config.dataset in FORMATS:
        raise DataError(
            f'dataset = "{config.dataset}" is a file format, so it needs dataset_path: a file, '
            f"a folder or a glob."
        )
    elif config.dataset == "c4_test":
        raise DataError(
            'dataset = "c4_test" is a fixture in torchtitan\'s own repository, which is not here. '
            f'Use dataset = "{DEFAULT_DATASET}" (no download), or set dataset_path to a copy of it.'
        )
    elif config.dataset in _C4_SPLITS:
        hub_name, hub_config = "allenai/c4", config.dataset_config or "en"
        split = _C4_SPLITS[config.dataset]
    else:
        hub_name, split = config.dataset, config.dataset_split
    if format == "text" and is_chat:
        raise DataError(
            f'messages_column = "{column}" needs conversations, and the files of '
            f"{config.dataset_path or config.dataset} are text. Set dataset_path to files in one "
            f"of the formats json, jsonl, parquet and arrow, or dataset to a data set on the hub."
        )
    if format == "text" and column != "text":
        raise DataError(
            f'text files have one column, "text", but text_column = "{column}". Leave it out.'
        )
    name = config.dataset if config.dataset_path is None else config.dataset_path
    meaning = f"{column}\x1fmessages" if is_chat else column
    if hub_name is None:
        fingerprint = _fingerprint_of_files(format or "", meaning, files)
    else:
        fingerprint = _fingerprint_on_hub(name, hub_name, hub_config, split, meaning)
    return Corpus(
        name=name,
        fingerprint=fingerprint,
        column=column,
        is_chat=is_chat,
        format="json" if format == "jsonl" else format,
        files=files,
        hub_name=hub_name,
        hub_config=hub_config,
        split=split,
        streaming=config.streaming,
        max_unusable_fraction=config.max_unusable_fraction,
    )


def _registered(config: CorpusConfig, column: str, *, is_chat: bool) -> Corpus:
    dataset = REGISTRY.datasets[config.dataset]
    parts = ("registered", config.dataset, dataset.version, column, repr(is_chat))
    return Corpus(
        name=config.dataset,
        fingerprint=hashlib.sha256("\x1f".join(parts).encode()).hexdigest(),
        column=column,
        is_chat=is_chat,
        format=None,
        files=(),
        hub_name=None,
        hub_config=None,
        split="",
        streaming=config.streaming,
        max_unusable_fraction=config.max_unusable_fraction,
        reader=dataset.documents,
    )


def _standard_library_files() -> tuple[Path, ...]:
    """Return the source files of the interpreter's standard library, without tests and packages."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in left_out]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(
            f"the standard library in {root} has no .py files (this Python ships it compiled). "
            f"Set training.dataset_path to text of your own."
        )
    return tuple(sorted(files))


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _fingerprint_of_files(format: str, column: str, files: tuple[Path, ...]) -> str:
    """Hash paths, sizes and times, without reading the files."""
    digest = hashlib.blake2b(f"{format}\n{column}".encode(), digest_size=16)
    for file in files:
        status = _status(file)
        digest.update(f"\n{file}\x1f{status.st_size}\x1f{status.st_mtime_ns}".encode())
    return digest.hexdigest()


def _status(file: Path) -> os.stat_result:
    with readable(file):
        return file.stat()


def _fingerprint_on_hub(
    name: str, hub_name: str, hub_config: str | None, split: str, column: str
) -> str:
    with _reading(name):
        import datasets

        builder = datasets.load_dataset_builder(hub_name, hub_config)
    key = "\x1f".join([hub_name, str(builder.config_id), str(builder.hash), split, column])
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Convert exceptions of `datasets` to one clear error, and keep its progress bars and logs off
    the console."""
    import datasets

    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    had_bars = not datasets.are_progress_bars_disabled()
    if had_bars:
        datasets.disable_progress_bars()
    try:
        yield
    except DataError:
        raise
    # `datasets` documents no common base class: an unknown name, an unreachable hub,
    # a damaged file and a wrong split raise different classes.
    except Exception as error:
        cause = error.__cause__ or error
        offline = (
            " The hub can only be reached online and with HF_HUB_OFFLINE unset; for files on this "
            "machine set dataset_path."
            if isinstance(error, ConnectionError | FileNotFoundError)
            else ""
        )
        message = " ".join(str(cause).split()).rstrip(".")
        raise DataError(
            f"cannot read the corpus {name!r}: {type(cause).__name__}: {message}.{offline}"
        ) from error
    finally:
        datasets.logging.set_verbosity(verbosity)
        if had_bars:
            datasets.enable_progress_bars()


def _position(state: Mapping[str, Any] | None) -> Position:
    """Return the position in `state`. Earlier releases stored the one of `datasets`: rows of a
    file, and rows read since, which may be of later files."""
    if state is None:
        return 0, 0
    if "file" in state:
        return state["file"], state["row"]
    inner = state["examples_iterable"]
    since = inner.get("num_chunks_since_previous_state", 0)
    inner = inner.get("previous_state", inner)
    return (0, since) if inner is None else (inner["shard_idx"], inner["shard_example_idx"] + since)
