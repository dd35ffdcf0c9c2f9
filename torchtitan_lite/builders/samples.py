"""What a run lets its model generate: in validations, and at its end. Layer: above data and
text_generator."""

from pathlib import Path

from torchtitan_lite.checkpoint import run_on_all_ranks
from torchtitan_lite.config import Config
from torchtitan_lite.data import OpenedData
from torchtitan_lite.data.chat_prompt import ChatPrompt, chat_prompt, first_question
from torchtitan_lite.data.chat_template import find_template


def sample_prompt(config: Config, data: OpenedData, text: str) -> str | ChatPrompt:
    """Return the prompt of a sample: `text`, or for a run on conversations a message with it, or
    without a text the first question of its data. Every rank must call it. Raises DataError on all
    ranks."""
    corpora = config.training.resolved_corpora()
    if all(one.messages_column is None for one in corpora):
        return text

    def prompt() -> str | ChatPrompt:
        messages = [{"role": "user", "content": text}]
        if not text:
            messages = first_question(corpora, Path(config.training.cache_folder).expanduser())
        if messages is None:
            return text
        return chat_prompt(data.tokenizer(), find_template(data.tokenizer_files.folder), messages)

    return run_on_all_ranks(prompt)
