"""Texts that continue prompts, and answers to conversations."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

from torchtitan_lite.core.errors import UserError
from torchtitan_lite.data.chat_prompt import chat_prompt
from torchtitan_lite.data.chat_template import Messages, find_template
from torchtitan_lite.distributed.host_collectives import all_gather_bytes
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.serving.inference.generation import (
    BatchGenerator,
    Generated,
    Prompt,
    TextStream,
    check_prompts,
    prompt_ids,
)
from torchtitan_lite.serving.inference.loaded_model import LoadedModel, ModelFiles
from torchtitan_lite.serving.inference.sampling import Sampling
from torchtitan_lite.serving.inference.weights import stop_ids


@dataclass(frozen=True, kw_only=True)
class GeneratedText:
    """A text that continues a prompt, or the answer to a conversation."""

    prompt: str | Messages
    text: str
    """Without the prompt."""
    ids: list[int]
    """Token ids of `text`."""
    ended_by: str
    """"stop" (the end of a document, or of the assistant's turn) or "length"."""


def generate(
    loaded: LoadedModel,
    prompts: str | Sequence[str | Messages],
    *,
    max_new_tokens: int = 128,
    temperature: float = Sampling.temperature,
    top_p: float = Sampling.top_p,
    seed: int = Sampling.seed,
    num_samples: int = 1,
    stream: TextIO | None = None,
) -> list[GeneratedText]:
    """Generate `num_samples` texts for each of `prompts`, in their order, the same on every rank
    and every mesh. All prompts form one batch.

    A string is continued. A conversation, which is a list of messages such as
    `{"role": "user", "content": "Hello"}`, is answered, with the chat template of the tokenizer.

    Temperature 0 selects the most likely token. A text depends on `seed` and its index among the
    samples of its prompt. It ends with its document or turn, after `max_new_tokens` tokens, or at
    the longest sequence of the model, with a warning. `stream` receives the text of a single prompt
    as it is generated, on the first rank.

    Every rank of the model's mesh must call it, with the same arguments. Raises UserError for
    arguments out of their range and for prompts that are empty or too long, and DataError if there
    is no chat template or it rejects a conversation.
    """
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    for name, value in (("max_new_tokens", max_new_tokens), ("num_samples", num_samples)):
        if value < 1:
            raise UserError(f"{name} = {value} must be at least 1.")
    listed = [prompts] if isinstance(prompts, str) else list(prompts)
    if stream is not None and len(listed) * num_samples != 1:
        raise UserError(
            f"stream receives one text, but there are {len(listed)} prompts with {num_samples} "
            "samples each. Give one prompt with one sample, or leave stream out."
        )
    encoded, stops = encode_prompts(loaded, listed)
    batch = [Prompt(ids, sample=index) for ids in encoded for index in range(num_samples)]
    writer = TextStream(loaded.tokenizer, stream) if stream and loaded.mesh.is_leader else None

    def on_token(index: int, token: int) -> None:
        if writer is not None:
            writer.take(token)

    def complete(own: Sequence[Prompt]) -> list[Generated]:
        with BatchGenerator(loaded.model, loaded.spec, loaded.mesh) as generator:
            return generator.generate(
                own,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                stop_ids=stops,
                on_token=on_token,
            )

    completed = _complete_on_all_ranks(batch, complete, loaded.mesh)
    if writer is not None:
        writer.close()
    return [
        GeneratedText(
            prompt=listed[index // num_samples],
            text=loaded.tokenizer.decode(completion.ids),
            ids=completion.ids,
            ended_by="stop" if completion.stopped else "length",
        )
        for index, completion in enumerate(completed)
    ]


def encode_prompts(
    files: ModelFiles, prompts: Sequence[str | Messages]
) -> tuple[list[Sequence[int]], set[int]]:
    """Return the ids of each prompt, and those that end a text. Raises as `generate`."""
    stops = stop_ids(files.tokenizer, files.tokenizer_folder)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    chats = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if texts and chats:
        raise UserError(
            f"{len(texts)} prompts are texts and {len(chats)} are conversations, which end by "
            "other tokens. Generate the two in calls of their own."
        )
    if not all(map(_is_conversation, chats)):
        raise UserError(
            "A prompt is neither a text nor a list of messages with a role. Give texts, or a list "
            'of conversations: [[{"role": "user", "content": "..."}]].'
        )
    encoded: list[Sequence[int]] = [prompt_ids(files.tokenizer, text) for text in texts]
    if chats:
        template = find_template(files.tokenizer_folder)
        answered = [chat_prompt(files.tokenizer, template, chat) for chat in chats]
        encoded = [chat_ids.ids for chat_ids in answered]
        stops = stops.union(*(chat_ids.stop_ids for chat_ids in answered))
    check_prompts([Prompt(ids) for ids in encoded], files.spec)
    return encoded, stops


def _is_conversation(chat: Messages) -> bool:
    messages = [isinstance(message, Mapping) and "role" in message for message in chat]
    return bool(messages) and all(messages)


def _complete_on_all_ranks(
    batch: Sequence[Prompt],
    complete: Callable[[Sequence[Prompt]], list[Generated]],
    mesh: Mesh,
) -> list[Generated]:
    """Split a batch over the copies of the model, and return what all of them generated, on every
    rank, in the order of `batch`."""
    if mesh.world_size == 1:
        # This process may have no process group.
        return complete(batch)
    own = complete(batch[mesh.batch_rank :: mesh.degrees.batch])
    is_first = mesh.device_mesh.get_local_rank("tp") == 0
    text = json.dumps([asdict(completion) for completion in own]) if is_first else ""
    copies = [json.loads(part) for part in all_gather_bytes(text.encode()) if part]
    return [
        Generated(**copies[index % len(copies)][index // len(copies)])
        for index in range(len(batch))
    ]
