"""The texts of a corpus."""

from collections.abc import Iterator
from typing import Any

from torchtitan_lite.core.errors import DataError
from torchtitan_lite.data.corpus import Corpus
from torchtitan_lite.data.row_files import RepeatedKeys, Row, kind_of
from torchtitan_lite.data.unusable_rows import UnusableRows


def read_documents(corpus: Corpus, unusable: UnusableRows) -> Iterator[str]:
    """Yield the texts of `corpus` in order, without empty ones; add rows without text to
    `unusable`. Raises DataError for a file that cannot be read."""
    for row in corpus.rows([corpus.column]).rows:
        text = text_of(row, corpus.column, unusable)
        if text:
            yield text


def text_of(row: Row, column: str, unusable: UnusableRows) -> str:
    """Return the text of a row; "" if it has none that can be used, which is added to `unusable`.
    Raises DataError for a damaged row."""
    if row.damage:
        raise DataError(f"{row.place}: {row.damage}{row.remedy}")
    unusable.num_rows += 1
    value = row.values.get(column)
    problem = _problem_of(value, row, column)
    if problem:
        unusable.add(row.place, problem)
        return ""
    unusable.num_empty += not value
    return value if isinstance(value, str) else ""


def _problem_of(value: Any, row: Row, column: str) -> str:
    if column not in row.values:
        return missing_column(row, column)
    if isinstance(row.values, RepeatedKeys) and column in row.values.repeated:
        return f"{column!r} is given several times, with different values"
    if not isinstance(value, str):
        return f"{column!r} is {kind_of(value)}, not a text"
    if not value.isascii() and not is_unicode(value):
        return f"{column!r} contains an unpaired surrogate, which is no character"
    return ""


def missing_column(row: Row, column: str) -> str:
    """Describe a row without `column`."""
    names = ", ".join(repr(key) for key in (row.columns or list(row.values))[:8]) or "none"
    return f"it has no {column!r}; its columns are {names}"


def is_unicode(text: str) -> bool:
    """Return whether a text has no unpaired surrogate, which no tokenizer encodes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
