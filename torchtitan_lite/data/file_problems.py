"""Diagnosis of unreadable local data files: file, line, content, and expected content.

`datasets` reports the position in a chunk, not the line of a file. The files are read here only
after it has failed. Layer: above errors; imported by corpus. Invariant: no file is changed, and the
result is None if no problem is found.
"""

import json
import lzma
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

DECOMPRESSION_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""Raised for a damaged compressed file, or a wrong extension."""
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def first_problem(
    files: Sequence[Path], format: str, column: str, *, is_chat: bool = False
) -> str | None:
    """Return one line about the first unreadable content of `files`, or None."""
    try:
        for file in files:
            if problem := _problem_of(file, format, column, is_chat):
                return problem
        return _differing_keys(files) if format == "json" else None
    except (OSError, EOFError, RecursionError):
        # `datasets` has already reported it.
        return None


def encoding_problem(place: str, line: bytes, error: UnicodeDecodeError) -> str:
    """Describe a line that is not UTF-8."""
    byte = error.object[error.start]
    encoding = "UTF-16" if line.startswith(_UTF16_MARKS) else "LATIN1"
    return (
        f"{place}: not UTF-8 (byte 0x{byte:02x} in column {error.start + 1}), and data files must "
        f"be. Convert the file, for example by iconv -f {encoding} -t UTF-8."
    )


def _problem_of(file: Path, format: str, column: str, is_chat: bool) -> str | None:
    if format == "parquet":
        return _parquet_problem(file)
    if format not in ("json", "text"):
        return None
    lines = _decoded(file)
    for first in lines:
        if isinstance(first, str):
            return first
        if format == "json":
            return _json_problem(file, chain([first], lines), column, is_chat)
    return None


def _decoded(file: Path) -> Iterator[tuple[int, str] | str]:
    """Yield the numbered lines of a file until a problem."""
    # Imported here, because a start with a warm token cache does not need it.
    import fsspec

    try:
        opened: Any = fsspec.open(str(file), "rb", compression="infer")
        with opened as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1:
                    line = line.removeprefix(_UTF8_MARK)
                try:
                    text = line.decode()
                except UnicodeDecodeError as error:
                    yield encoding_problem(f"{file}:{number}", line, error)
                    return
                yield number, text
    except DECOMPRESSION_ERRORS as error:
        # Errors of the operating system have a number, those of gzip and bz2 do not.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error).split()).rstrip(".")
        yield (
            f"{file}: not a {file.suffix} file that can be decompressed ({reason}). Replace it, or "
            "exclude it from dataset_path."
        )


def _json_problem(
    file: Path, lines: Iterable[tuple[int, str] | str], column: str, is_chat: bool
) -> str | None:
    rest = iter(lines)
    num_records = 0
    for item in rest:
        if isinstance(item, str):
            return item
        number, line = item
        if not line.strip():
            continue
        num_records += 1
        if num_records == 1 and line.lstrip().startswith("["):
            return _list_problem(file, number, line, rest, column, is_chat)
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if num_records == 1 and _is_one_value(line, rest):
                return None
            return (
                f"{file}:{number}: not JSON ({error.msg}, column {error.colno}), and each line "
                "must be one JSON object. Correct the line or remove it."
            )
        except ValueError:
            return f"{file}:{number}: {_too_many_digits()} Correct the line or remove it."
        if problem := _record_problem(f"{file}:{number}", record, column, is_chat):
            return problem
    if num_records == 0:
        return f"{file}: no documents, only blank lines. Write documents to it, or exclude it."
    return None


def _list_problem(
    file: Path,
    number: int,
    line: str,
    rest: Iterator[tuple[int, str] | str],
    column: str,
    is_chat: bool,
) -> str | None:
    texts = [line]
    for item in rest:
        if isinstance(item, str):
            return item
        texts.append(item[1])
    try:
        records = json.loads("".join(texts))
    except json.JSONDecodeError as error:
        return (
            f"{file}:{number + error.lineno - 1}: not JSON ({error.msg}, column {error.colno}), "
            "and the file must be a list of JSON objects, or one object per line. Correct it."
        )
    except ValueError:
        return f"{file}: {_too_many_digits()} Correct it."
    problems = (
        _record_problem(f"{file}, item {place}", record, column, is_chat)
        for place, record in enumerate(records, start=1)
    )
    return next((problem for problem in problems if problem), None)


def _too_many_digits() -> str:
    return f"an integer has more than {sys.get_int_max_str_digits()} digits, the limit of Python."


def _is_one_value(line: str, rest: Iterator[tuple[int, str] | str]) -> bool:
    """Whether a file whose first line is not JSON is one JSON value over several lines."""
    texts = [line]
    for item in rest:
        if isinstance(item, str):
            return False
        texts.append(item[1])
    try:
        json.loads("".join(texts))
    except ValueError:
        return False
    return len(texts) > 1


def _record_problem(place: str, record: Any, column: str, is_chat: bool) -> str | None:
    if not isinstance(record, dict):
        return (
            f"{place}: {_kind(record)}, but a document must be a JSON object such as "
            f'{{"{column}": "..."}}. Correct it or remove it.'
        )
    value = record.get(column)
    if not is_chat and value is not None and not isinstance(value, str):
        return (
            f'{place}: "{column}" is {_kind(value)}, but a document must be a string. Correct it, '
            "or set text_column to a key whose values are strings."
        )
    return None


def _differing_keys(files: Sequence[Path]) -> str | None:
    """Return files whose first records have different keys, which `datasets` cannot read as one
    table."""
    first: tuple[Path, list[str]] | None = None
    for file in files:
        keys = _first_keys(file)
        if keys is None:
            continue
        if first is None:
            first = file, keys
        elif sorted(keys) != sorted(first[1]):
            return (
                f"{file}: its first document has the keys {', '.join(map(repr, keys))}, that of "
                f"{first[0]} has {', '.join(map(repr, first[1]))}, and all files of a corpus must "
                "have the same. Remove the others, or name the files in several "
                "[[training.corpora]]."
            )
    return None


def _first_keys(file: Path) -> list[str] | None:
    for item in _decoded(file):
        if isinstance(item, tuple) and item[1].strip():
            try:
                record = json.loads(item[1])
            except ValueError:
                return None
            return list(record) if isinstance(record, dict) else None
    return None


def _parquet_problem(file: Path) -> str | None:
    import pyarrow
    import pyarrow.parquet

    try:
        pyarrow.parquet.read_metadata(file)
    except pyarrow.ArrowException as error:
        (first, *_) = str(error).splitlines() or ["unknown cause"]
        return (
            f"{file}: not a Parquet file that can be read ({first.rstrip('.')}). Replace it, or "
            "exclude it from dataset_path."
        )
    return None


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else kinds.get(type(value), "a number")
