"""Rows of a corpus that cannot be trained on: counted, reported, and limited.

Invariant: no row is left out without a word. A few are left out with a warning that names the
first; more than `max_unusable_fraction`, or damage of a file, are an error.
"""

from collections.abc import Mapping
from typing import Any

from torchtitan_lite.core.errors import DataError
from torchtitan_lite.core.log import logger, warn_on_rank_0
from torchtitan_lite.data.corpus import Corpus

_LISTED = 20
"""Maximum conversations listed in an error; the rest is counted."""
_FIRST_ROWS = 10_000
"""Rows that a stream is taken to have at least, so that one early row does not end the run."""


class UnusableRows:
    """The number of rows of a corpus, and those that cannot be used."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._count = 0
        self._problems: list[str] = []
        self._num_damaged = 0
        self._first_damage = ""
        self._num_reported = 0
        self._remarks: dict[str, dict[str, Any]] = {}
        self.num_rows = 0
        self.num_empty = 0
        """Rows whose text is empty, which is no problem."""

    def __len__(self) -> int:
        return self._count

    def add(self, place: str, why: str, *, is_damage: bool = False) -> None:
        """Add the row at `place`. `is_damage`: the file is damaged, which is always an error."""
        self._count += 1
        if is_damage:
            self._num_damaged += 1
            self._first_damage = self._first_damage or place
        if self._count <= _LISTED:
            self._problems.append(f"{place}: {why}")

    def remark(self, place: str, what: str) -> None:
        """Note that the row at `place`, which is used, lacks or has something."""
        remark = self._remarks.setdefault(what, {"count": 0, "first": place})
        remark["count"] += 1

    def check(self, *, is_end: bool = True) -> None:
        """Raise DataError if there are too many, among all rows or (`is_end` = False) among those
        that are read so far."""
        rows = self.num_rows if is_end else max(self.num_rows, _FIRST_ROWS)
        if self._num_damaged or self._count > self._corpus.max_unusable_fraction * rows:
            raise DataError(self._conversations() if self._corpus.is_chat else self._texts())

    def report(self) -> None:
        """Log the rows that are left out, on rank 0, because all ranks read the same rows. A later
        call logs their number if there are more."""
        rows = "conversations" if self._corpus.is_chat else "rows"
        if self._count > self._num_reported:
            warn_on_rank_0(
                "corpus %s: %s of %s %s cannot be used and are left out%s",
                self._corpus.name,
                f"{self._count:,}",
                f"{self.num_rows:,}",
                rows,
                "" if self._num_reported else f"; the first is {self._problems[0]}",
            )
            self._num_reported = self._count
        if self.num_empty:
            logger.info(
                "corpus %s: %s of %s %s are empty",
                self._corpus.name,
                f"{self.num_empty:,}",
                f"{self.num_rows:,}",
                rows,
            )

        for what, remark in self._remarks.items():
            warn_on_rank_0(
                "corpus %s: %s of %s %s %s; the first is %s",
                self._corpus.name,
                f"{remark['count']:,}",
                f"{self.num_rows:,}",
                rows,
                what,
                remark["first"],
            )

    def values(self) -> dict[str, Any]:
        """Return JSON values for `load`."""
        return {
            "rows": self.num_rows,
            "empty": self.num_empty,
            "unusable": self._count,
            "problems": self._problems,
            "remarks": self._remarks,
        }

    def load(self, values: Mapping[str, Any]) -> None:
        """Restore what `values` returned."""
        self.num_rows, self.num_empty = values["rows"], values["empty"]
        self._count, self._problems = values["unusable"], list(values["problems"])
        self._remarks = dict(values["remarks"])

    def _texts(self) -> str:
        corpus = self._corpus
        return (
            f"{self._count:,} of {self.num_rows:,} rows of {corpus.name} have no usable text; the "
            f"first is {self._problems[0]}. Correct or remove them, set text_column to another "
            "column, or allow them by max_unusable_fraction (now "
            f"{corpus.max_unusable_fraction:g})."
        )

    def _conversations(self) -> str:
        column, limit = self._corpus.column, self._corpus.max_unusable_fraction
        more = self._count - len(self._problems)
        listed = "\n".join(
            f"  {line}" for line in self._problems + ([f"and {more} more"] if more else [])
        )
        remedy = f", or allow up to a fraction by max_unusable_fraction (now {limit:g})"
        if self._num_damaged:
            remedy = (
                f": damage, of {self._num_damaged} of them, is an error whatever "
                f"max_unusable_fraction is; the first is {self._first_damage}"
            )
        few = "1 conversation" if self._count == 1 else f"{self._count} conversations"
        return (
            f"{few} of {self._corpus.name} cannot be used:\n{listed}\n"
            f'Correct or remove them{remedy}. A conversation is {{"{column}": [{{"role": "user", '
            f'"content": "..."}}, {{"role": "assistant", "content": "..."}}, ...]}}.'
        )
