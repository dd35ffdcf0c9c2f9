"""The task: sums of two digits, "3+4=" to "7", with a reward that a program computes."""

from collections.abc import Sequence

DIGITS = "0123456789"
VOCABULARY = (*DIGITS, "+", "=", "<end>")
"""Tokens by id, as in tokenizer/tokenizer.json."""
END = VOCABULARY.index("<end>")
ANSWER_TOKENS = 3
"""Two digits and the end."""
PROMPT_TOKENS = 4
SEQ_LEN = PROMPT_TOKENS + ANSWER_TOKENS - 1
"""Positions of a forward pass: the last token is only a target."""
PROMPTS = tuple(f"{a}+{b}=" for a in range(10) for b in range(10))
SAMPLES_PER_PROMPT = 8
SAMPLES_PER_STEP = len(PROMPTS) * SAMPLES_PER_PROMPT


def encode(text: str) -> list[int]:
    """Return the ids of the characters of `text`."""
    return [VOCABULARY.index(character) for character in text]


def decode(ids: Sequence[int]) -> str:
    """Return the text of `ids`."""
    return "".join(VOCABULARY[one] for one in ids)


def answer_of(ids: Sequence[int]) -> list[int]:
    """Return the tokens of a generated answer up to its end, if it has one."""
    return list(ids[: ids.index(END) + 1]) if END in ids else list(ids)


def right_answer(prompt: str) -> list[int]:
    """Return the tokens of the decimal sum, without leading zero, and the end."""
    left, right = prompt.rstrip("=").split("+")
    return [*encode(str(int(left) + int(right))), END]


def reward(prompt: str, answer: Sequence[int]) -> float:
    """Return the fraction of the tokens of `answer` that are those of the right answer in the same
    places; 1 only for the right answer, of the right length. A program computes it, and nothing but
    the answer counts."""
    right = right_answer(prompt)
    num_right = sum(ours == theirs for ours, theirs in zip(answer, right, strict=False))
    return num_right / max(len(answer), len(right))
