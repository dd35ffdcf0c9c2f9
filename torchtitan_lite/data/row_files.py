"""The rows of local data files, one by one, each with its file and its line or number.

Values are read as they are written: no type is inferred from a text, and columns that are not
needed are not read. Invariant: every row is returned, with its damage if it cannot be read; a file
that cannot be read raises DataError. `pyarrow` and `fsspec` are imported when a file is read,
because a start with a warm token cache does not need them.
"""

import io
import json
import lzma
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_lite.core.errors import DataError

Position = tuple[int, int]
"""Number of a file, and rows of it that are read."""
TEXT = "text"
"""Column of files that are documents, and of rows that are a bare text in a JSON list."""
_DECOMPRESSION_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error, zipfile.BadZipFile)
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_ROWS_PER_READ = 256
_BLANKS = " \t\r\n"
_BLANK_RUN = re.compile(rf"[{_BLANKS}]*")
_MAX_FIRST_OBJECT_BYTES = 1 << 24
"""Maximum size of the first object of a file if it extends over several lines."""


class Row(NamedTuple):
    """A row of a file."""

    place: str
    """File, and line, item or row; for messages."""
    values: Mapping[str, Any]
    damage: str = ""
    """Why the row cannot be read, if so."""
    remedy: str = ""
    """End of the error's sentence: what is needed, and what to change."""
    columns: Sequence[str] = ()
    """All columns, of which `values` has those that are needed."""


class RepeatedKeys(dict[str, Any]):
    """A JSON object that gives keys several different values; it has the last ones."""

    repeated: frozenset[str]


def read_rows(
    files: Sequence[Path], format: str, columns: Collection[str], start: Position = (0, 0)
) -> Iterator[tuple[Position, Row]]:
    """Yield the rows of `files` from `start` on, each with the position behind it. `format` is
    "json", "parquet", "arrow" or "text"; of tables only `columns` are read. Raises DataError for a
    file that cannot be read."""
    first, skipped = start
    read = _READERS.get(format, partial(_table_rows, format=format, columns=columns))
    for file_index, file in enumerate(files[first:], start=first):
        refuse_pointer(file)
        index = 0
        for index, row in enumerate(read(file), start=1):
            if index > skipped:
                yield (file_index, index), row
        # Positions of earlier releases count on into the next file.
        skipped = max(0, skipped - index)


def refuse_pointer(file: Path) -> None:
    """Raise DataError for a file of Git LFS that was not downloaded. It is text, so that it could
    be taken for data. Raises DataError for a file that cannot be read, too."""
    with readable(file), file.open("rb") as stream:
        if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise DataError(
                f"{file}: not the data but a pointer to it, of Git LFS. Run git lfs pull in that "
                "repository, or download the file."
            )


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Raise DataError if the operating system refuses to read `file` in the block."""
    try:
        yield
    except OSError as error:
        # Errors of the operating system have a number, those of gzip, bz2 and pyarrow do not.
        if error.errno is None:
            raise
        raise DataError(f"{file}: cannot be read: {error.strerror}.") from error


def kind_of(value: Any) -> str:
    """Return what a value is, in the words of JSON."""
    kinds = {dict: "an object", RepeatedKeys: "an object", list: "a list", str: "a text"}
    kinds |= {bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else kinds.get(type(value), f"of type {type(value).__name__}")


def _document(file: Path) -> Iterator[Row]:
    """Yield a file as one row."""
    with _opened(file) as stream:
        content = stream.read()
    try:
        text = content.removeprefix(_UTF8_MARK).decode()
    except UnicodeDecodeError:
        for number, line in enumerate(content.splitlines(keepends=True), start=1):
            _, problem, remedy = _decoded(line)
            if problem:
                raise DataError(f"{file}:{number}: {problem}{remedy}") from None
        raise
    if content:
        yield Row(str(file), {TEXT: text})


def _json_rows(file: Path) -> Iterator[Row]:
    """Yield the objects of a JSON file: one per line, or in any other arrangement."""
    with _opened(file) as stream:
        first, line = next(
            ((n, line) for n, line in enumerate(stream, start=1) if line.strip()), (0, b"")
        )
        line = line.removeprefix(_UTF8_MARK)
        if first == 0:
            # Blank lines alone are no harm beside other files.
            return
        if line.lstrip().startswith(b"["):
            yield from _list_rows(file, first, line + stream.read())
            return
        lines = chain([line], stream)
        if next(_line_rows("", line)).damage:
            head = line + stream.read(_MAX_FIRST_OBJECT_BYTES) + stream.readline()
            lines = chain(io.BytesIO(head), stream)
            if _extends_beyond(line, head):
                content = head + stream.read()
                values, problem, _ = _values(content)
                if not problem:
                    for item, value in enumerate(values, start=1):
                        yield _object(f"{file}, item {item}", value)
                    return
                lines = io.BytesIO(content)
        for number, content in enumerate(lines, start=first):
            if content.strip():
                yield from _line_rows(f"{file}:{number}", content)


def _extends_beyond(line: bytes, head: bytes) -> bool:
    """Whether the JSON values at the begin of `head` extend beyond its first line, so that a line
    is no object."""
    try:
        length, text, end = len(line.decode().rstrip(_BLANKS)), head.decode(errors="replace"), 0
        while end < length:
            _, end = _DECODER.raw_decode(text, _end_of_blanks(text, end))
    except (ValueError, RecursionError):
        return False
    return end > length


def _line_rows(place: str, line: bytes) -> Iterator[Row]:
    """Yield the object in a line, or the objects: a writer that was killed leaves no line break."""
    values, problem, remedy = _values(line)
    if problem:
        yield Row(place, {}, problem, remedy)
    for value in values:
        yield _object(place, value)


def _list_rows(file: Path, first_line: int, content: bytes) -> Iterator[Row]:
    text, problem, remedy = _decoded(content)
    if problem:
        raise DataError(f"{file}: {problem}{remedy}")
    try:
        values = _loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file}:{first_line + error.lineno - 1}: not JSON ({error.msg}, column "
            f"{error.colno}), and the file must be a list of JSON objects, or one object per line. "
            "Correct it."
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: {_unreadable(error)}. Correct it.") from None
    for item, value in enumerate(values, start=1):
        value = {TEXT: value} if isinstance(value, str) else value
        yield _object(f"{file}, item {item}", value)


def _object(place: str, value: Any) -> Row:
    if isinstance(value, dict):
        return Row(place, value)
    return Row(
        place,
        {},
        f"not a JSON object but {kind_of(value)}",
        ", and each row must be one. Correct it or remove it.",
    )


def _values(content: bytes) -> tuple[list[Any], str, str]:
    """Return the JSON values in `content`, one after another, and the problem and its remedy, if
    any."""
    text, problem, remedy = _decoded(content)
    if problem:
        return [], problem, remedy
    text = text.strip(_BLANKS)
    remedy = ", and each line must be one JSON object. Correct the line or remove it."
    try:
        return [_loads(text)], "", ""
    except json.JSONDecodeError as error:
        values, end = [], 0
        while end < len(text):
            try:
                value, end = _DECODER.raw_decode(text, end)
            except (ValueError, RecursionError):
                column = error.pos + 1
                return [], f"not JSON ({error.msg}, column {column})", remedy
            values.append(value)
            end = _end_of_blanks(text, end)
        return values, "", ""
    except (ValueError, RecursionError) as error:
        return [], _unreadable(error), ". Correct the line or remove it."


def _end_of_blanks(text: str, start: int) -> int:
    blanks = _BLANK_RUN.match(text, start)
    return blanks.end() if blanks else start


def _unreadable(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "JSON that is nested too deeply"
    return f"an integer has more than {sys.get_int_max_str_digits()} digits, the limit of Python"


def _decoded(content: bytes) -> tuple[str, str, str]:
    """Return a text, or the problem and its remedy."""
    try:
        return content.decode(), "", ""
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if content.startswith(_UTF16_MARKS) else "LATIN1"
        return (
            "",
            f"not UTF-8 (byte 0x{content[error.start]:02x} in column {error.start + 1})",
            ", and data files must be. Convert the file, for example by "
            f"iconv -f {encoding} -t UTF-8.",
        )


def _with_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    marked = RepeatedKeys(values)
    marked.repeated = frozenset(key for key, value in pairs if values[key] != value)
    return marked


# Line breaks and tabs within a text are harmless, though JSON wants them escaped.
_DECODER = json.JSONDecoder(strict=False, object_pairs_hook=_with_repeated)
_loads = _DECODER.decode


def _table_rows(file: Path, *, format: str, columns: Collection[str]) -> Iterator[Row]:
    """Yield the rows of a Parquet or Arrow file."""
    import pyarrow

    number = 0
    try:
        for names, batch in _BATCHES[format](file, columns):
            for row in _rows_of(batch):
                number += 1
                if isinstance(row, str):
                    yield Row(f"{file}, row {number}", {}, row, ". Correct it or remove it.", names)
                else:
                    yield Row(f"{file}, row {number}", row, columns=names)
    except (pyarrow.ArrowException, OSError) as error:
        (first, *_) = str(error).splitlines() or ["unknown cause"]
        raise DataError(
            f"{file}: not {_TITLES[format]} file that can be read ({first.rstrip('.')}). Replace "
            "it, or exclude it from dataset_path."
        ) from error


def _parquet_batches(file: Path, columns: Collection[str]) -> Iterator[tuple[list[str], Any]]:
    from pyarrow import parquet

    with _opened(file) as stream, parquet.ParquetFile(stream) as table:
        names = table.schema_arrow.names
        needed = [name for name in names if name in columns]
        for batch in table.iter_batches(batch_size=_ROWS_PER_READ, columns=needed):
            yield names, batch


def _arrow_batches(file: Path, columns: Collection[str]) -> Iterator[tuple[list[str], Any]]:
    import pyarrow

    with pyarrow.memory_map(str(file)) as stream:
        try:
            batches: Any = pyarrow.ipc.open_stream(stream)
        except pyarrow.ArrowInvalid:
            reader = pyarrow.ipc.open_file(stream)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        for batch in batches:
            names = batch.schema.names
            needed = batch.select([name for name in names if name in columns])
            for start in range(0, batch.num_rows, _ROWS_PER_READ):
                yield names, needed.slice(start, _ROWS_PER_READ)


def _rows_of(batch: Any) -> Iterator[dict[str, Any] | str]:
    """Yield the rows of a batch; for one with text that is not UTF-8, the problem."""
    from datasets import Features

    # Values of mixed types are stored as JSON text.
    decode = Features.from_arrow_schema(batch.schema).decode_example
    try:
        yield from map(decode, batch.to_pylist())
    except UnicodeDecodeError:
        if batch.num_rows > 1:
            for index in range(batch.num_rows):
                yield from _rows_of(batch.slice(index, 1))
        else:
            yield "it has text that is not UTF-8"


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a file that may be compressed. Raises DataError if it cannot be opened or read."""
    try:
        with readable(file), _decompressed(file) as stream:
            yield stream
    except _DECOMPRESSION_ERRORS as error:
        if file.suffix.lower() not in (".zst", ".zip", *_COMPRESSIONS):
            # Raised by pyarrow: the contents of the file are damaged.
            raise
        reason = " ".join(str(error).split()).rstrip(".")
        raise DataError(
            f"{file}: not a {file.suffix} file that can be decompressed ({reason}). Replace it, or "
            "exclude it from dataset_path."
        ) from error


@contextmanager
def _decompressed(file: Path) -> Iterator[Any]:
    if file.suffix.lower() == ".zst":
        import pyarrow

        with pyarrow.input_stream(str(file), compression="zstd") as raw:
            yield io.BufferedReader(raw)
    elif file.suffix.lower() == ".zip":
        with zipfile.ZipFile(file) as archive, archive.open(_only_member(file, archive)) as raw:
            yield raw
    else:
        # By the extension, which fsspec wants in lower case.
        import fsspec

        opened: Any = fsspec.open(
            str(file), "rb", compression=_COMPRESSIONS.get(file.suffix.lower())
        )
        with opened as stream:
            yield stream


def _only_member(file: Path, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    """Return the data file of an archive. Raises DataError if it has none, several, or one that
    Python cannot read."""
    members = [
        member
        for member in archive.infolist()
        if not member.is_dir() and not member.filename.startswith("__MACOSX/")
    ]
    if len(members) != 1:
        names = ", ".join(member.filename for member in members[:3])
        more = ", ..." if len(members) > 3 else ""
        raise DataError(
            f"{file}: an archive of {len(members)} files{f' ({names}{more})' if members else ''}, "
            "and it must be of one. Extract it, and set dataset_path to the folder."
        )
    is_encrypted = members[0].flag_bits & 1
    if is_encrypted or members[0].compress_type not in _ZIP_METHODS:
        problem = "encrypted" if is_encrypted else "compressed by a method that Python cannot read"
        raise DataError(f"{file}: {problem}. Extract it, and set dataset_path to the folder.")
    return members[0]


_ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz"}
_READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {"json": _json_rows, "text": _document}
_BATCHES = {"parquet": _parquet_batches, "arrow": _arrow_batches}
_TITLES = {"parquet": "a Parquet", "arrow": "an Arrow"}
