"""Samples that a run lets its model generate: in validations, and at its end."""

from collections.abc import Callable, Sequence
from functools import partial

from torchtitan_lite.config import Config
from torchtitan_lite.core.log import warn_on_rank_0
from torchtitan_lite.data import OpenedData
from torchtitan_lite.data.chat_prompt import ChatPrompt, chat_prompt, first_question
from torchtitan_lite.data.chat_template import find_template
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.on_all_ranks import run_on_all_ranks
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.training.builders.model import model_on_meta
from torchtitan_lite.training.text_generator import TextGenerator
from torchtitan_lite.training.train_state import TrainState


def sample_prompt(config: Config, data: OpenedData, text: str) -> str | ChatPrompt | None:
    """Return the prompt of a sample: `text`, or for a run on conversations a message with it, or
    without a text the first question of its data that the template accepts; None, with a warning,
    if there is none. Every rank must call it. Raises DataError on all ranks."""
    corpora = config.training.resolved_corpora()
    if all(corpus.messages_column is None for corpus in corpora):
        return text

    def prompt() -> ChatPrompt | None:
        tokenizer, template = data.tokenizer(), find_template(data.tokenizer_files.folder)
        if text:
            return chat_prompt(tokenizer, template, [{"role": "user", "content": text}])
        return first_question(tokenizer, template, corpora)

    sample = run_on_all_ranks(prompt)
    if sample is None:
        warn_on_rank_0(
            "No samples of the model: the chat template accepts no question of the data as a "
            "prompt. Set validation.sample_prompt for those of validations."
        )
    return sample


def build_text_generator(
    config: Config, spec: ModelSpec, data: OpenedData, mesh: Mesh
) -> TextGenerator:
    """Build the copy of the model that generates text. Every rank must call it. Raises ConfigError
    for a model that cannot."""
    whole = model_on_meta(config, spec)
    return TextGenerator(whole, spec, mesh, data.tokenizer(), seed=config.debug.seed or 0)


def validation_samples(
    config: Config, data: OpenedData, text_generator: TextGenerator | None
) -> Callable[[TrainState], Sequence[str]] | None:
    """Return the function that generates the texts of a validation; None without one."""
    if text_generator is None:
        return None
    validation = config.validation
    prompt = sample_prompt(config, data, validation.sample_prompt)
    if prompt is None:
        return None
    return partial(
        text_generator.texts,
        prompt=prompt,
        count=validation.samples,
        max_new_tokens=validation.sample_tokens,
        temperature=validation.sample_temperature,
    )
