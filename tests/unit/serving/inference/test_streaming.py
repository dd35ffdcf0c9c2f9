"""Text is printed as soon as its characters are complete."""

import io

from torchtitan_lite.data.tokenizer import train_tokenizer
from torchtitan_lite.serving.inference import TextStream

TEXT = "naïve\n    größe 日本 \U0001f600\n\n  end"


class _Buffered(io.StringIO):
    """A buffered output, and what of it was shown."""

    shown = ""

    def flush(self) -> None:
        self.shown = self.getvalue()


def test_the_pieces_add_up_to_the_text() -> None:
    # One token per byte: characters arrive in parts.
    tokenizer = train_tokenizer(["a"], 258)
    (ids,) = tokenizer.encode_batch([TEXT])
    out, lengths = _Buffered(), []
    stream = TextStream(tokenizer, out)
    for token in ids:
        stream.take(token)
        lengths.append(len(out.getvalue()))
        assert TEXT.startswith(out.getvalue()) and out.shown == out.getvalue()
    stream.close()
    assert out.getvalue() == TEXT
    assert lengths[-1] == len(TEXT) and lengths[0] == 1


def test_an_incomplete_character_is_written_at_the_end() -> None:
    tokenizer = train_tokenizer(["a"], 258)
    (ids,) = tokenizer.encode_batch(["a日"])
    out = io.StringIO()
    stream = TextStream(tokenizer, out)
    for token in ids[:-1]:
        stream.take(token)
    assert out.getvalue() == "a"
    stream.close()
    assert out.getvalue().startswith("a\ufffd")
