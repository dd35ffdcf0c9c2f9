"""What a run lets its model generate: in validations, and at its end."""

from torchtitan_lite.checkpoint import run_on_all_ranks
from torchtitan_lite.config import Config
from torchtitan_lite.core.log import warn_once
from torchtitan_lite.data import OpenedData
from torchtitan_lite.data.chat_prompt import ChatPrompt, chat_prompt, first_question
from torchtitan_lite.data.chat_template import find_template


def sample_prompt(config: Config, data: OpenedData, text: str) -> str | ChatPrompt | None:
    """Return the prompt of a sample: `text`, or for a run on conversations a message with it, or
    without a text the first question of its data that the template accepts; None, with a warning,
    if there is none. Every rank must call it. Raises DataError on all ranks."""
    corpora = config.training.resolved_corpora()
    if all(one.messages_column is None for one in corpora):
        return text

    def prompt() -> ChatPrompt | None:
        tokenizer, template = data.tokenizer(), find_template(data.tokenizer_files.folder)
        if text:
            return chat_prompt(tokenizer, template, [{"role": "user", "content": text}])
        return first_question(tokenizer, template, corpora)

    found = run_on_all_ranks(prompt)
    if found is None:
        warn_once(
            "No samples of the model: the chat template accepts no question of the data as a "
            "prompt. Set validation.sample_prompt for those of validations."
        )
    return found
