"""Command lines of this program."""

import pytest

from torchtitan_lite.core.commands import with_steps


@pytest.mark.parametrize(
    "before",
    ["", "--training.steps 5", "--training.steps=5", "--training.steps=5 --training.steps 6"],
)
def test_other_arguments_keep_their_places_around_the_number_of_steps(before: str) -> None:
    arguments = f"--config a.toml {before} --b 1".split()
    assert " ".join(with_steps(arguments, 9)) == "--config a.toml --b 1 --training.steps 9"
