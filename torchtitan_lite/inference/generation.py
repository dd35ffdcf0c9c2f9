"""Text generation with a KV cache: prompts are read in chunks, then all sequences advance by one
token per forward. Layer: above data, parallel, nn and spec; `kv_cache`, `sampling`."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
from torch import nn

from torchtitan_lite.data import Tokenizer
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.inference.kv_cache import KeyValueCache
from torchtitan_lite.inference.sampling import Sampling
from torchtitan_lite.log import logger
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.nn.decoder import OutputProjection
from torchtitan_lite.nn.moe import MoE
from torchtitan_lite.parallel.serving import broadcast_from_first
from torchtitan_lite.spec import ModelSpec


class LastPosition:
    """Lets a model project one position of each sequence onto the vocabulary."""

    def __init__(self, model: nn.Module) -> None:
        """From now on `model` gives logits [B, 1, V]."""
        self._places_B = torch.zeros(0, dtype=torch.int64)
        for module in model.modules():
            if isinstance(module, OutputProjection):
                module.register_forward_pre_hook(self._take)

    def wanted(self, places_B: torch.Tensor) -> None:
        """Say which one, by its place in the next forward pass."""
        self._places_B = places_B

    def _take(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_BSD = inputs[0]
        rows_B = torch.arange(len(hidden_BSD), device=hidden_BSD.device)
        return hidden_BSD[rows_B, self._places_B][:, None], *inputs[1:]


_READ_AT_ONCE = 1024
"""Positions of the prompts. The mask grows with it times the length; more would not be faster."""


@dataclass(frozen=True)
class Prompt:
    """What a sequence begins with."""

    ids: Sequence[int]
    sample: int = 0
    """Its number among the samples of the same prompt, which have different draws."""


@dataclass
class Generated:
    """What followed a prompt."""

    ids: list[int] = field(default_factory=list)
    stopped: bool = False
    """By a stop token, which is not among the ids; else by the length."""


def check_prompts(prompts: Sequence[Prompt], spec: ModelSpec) -> None:
    """Raise ConfigError for a prompt that leaves no position for another token."""
    for number, prompt in enumerate(prompts, start=1):
        if not 1 <= len(prompt.ids) < spec.max_seq_len:
            raise ConfigError(
                f"Prompt {number} has {len(prompt.ids)} tokens, but {spec.name} {spec.flavor} "
                f"reads {spec.max_seq_len} positions, of which one is needed for a new token. "
                f"Give 1 to {spec.max_seq_len - 1} tokens."
            )


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a prompt: the beginning of a document, if the tokenizer has one, and
    `text`."""
    (ids,) = tokenizer.encode_batch([text])
    start = tokenizer.bos_id
    if start is None and not ids:
        start = tokenizer.eos_id or 0
    return ids if start is None else [start, *ids]


class BatchGenerator:
    """A model that gives text, and its cache."""

    def __init__(self, model: nn.Module, spec: ModelSpec, mesh: Mesh) -> None:
        """`model` is one of `serve`, and gives text only from now on."""
        self._model, self._spec, self._mesh = model, spec, mesh
        self._device = mesh.device.torch_device
        self._cache = KeyValueCache(model)
        self._last = LastPosition(model)
        for module in model.modules():
            if isinstance(module, MoE):
                # A capacity is a share of whole sequences, of which a token alone knows nothing.
                module.capacity_factor = None

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop_ids: Collection[int] = (),
        heard: Callable[[int, int], None] = lambda number, token: None,
    ) -> list[Generated]:
        """What follows each prompt. Every rank of a copy must call it with the same prompts; ranks
        that hold other copies may have others. `heard` is told of each token: the number of its
        prompt, and its id. Raises ConfigError for a prompt that is too long."""
        check_prompts(prompts, self._spec)
        if not prompts:
            return []
        lengths = [len(prompt.ids) for prompt in prompts]
        ends = [min(length + max_new_tokens, self._spec.max_seq_len) for length in lengths]
        if max(lengths) + max_new_tokens > self._spec.max_seq_len:
            logger.warning(
                "Texts end at %d positions, all that %s %s reads, before they have %d new tokens.",
                self._spec.max_seq_len,
                self._spec.name,
                self._spec.flavor,
                max_new_tokens,
            )
        self._cache.make_room(len(prompts), max(ends))
        draws = [sampling.draws_of(prompt.sample) for prompt in prompts]
        given = [Generated() for _ in prompts]
        going = list(range(len(prompts)))
        logits_BV = self._read(prompts)
        while going:
            ids = broadcast_from_first(sampling.next_ids(logits_BV, draws), self._mesh)
            for number in going:
                one = given[number]
                one.stopped = ids[number] in stop_ids
                if not one.stopped:
                    one.ids.append(ids[number])
                    heard(number, ids[number])
            going = [
                number
                for number in going
                if not given[number].stopped
                and lengths[number] + len(given[number].ids) < ends[number]
            ]
            if going:
                # A sequence that has ended stays where it is: the others keep their places.
                places = [n + len(one.ids) - 1 for n, one in zip(lengths, given, strict=True)]
                logits_BV = self._forward(
                    _column(ids), _column(places), _column([0] * len(ids))[:, 0]
                )
        return given

    def _read(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Read the prompts; the logits behind the end of each."""
        length = max(len(prompt.ids) for prompt in prompts)
        tokens_BS = torch.tensor([[*p.ids, *[0] * (length - len(p.ids))] for p in prompts])
        ends_B = torch.tensor([len(prompt.ids) - 1 for prompt in prompts])
        logits_BV = torch.empty(0)
        for first in range(0, length, _READ_AT_ONCE):
            part_BS = tokens_BS[:, first : first + _READ_AT_ONCE]
            count = part_BS.shape[1]
            positions_BS = torch.arange(first, first + count).expand_as(part_BS)
            places_B = (ends_B - first).clamp(0, count - 1)
            found_BV = self._forward(part_BS, positions_BS, places_B)
            is_end_B1 = (ends_B - first == places_B)[:, None].to(self._device)
            logits_BV = torch.where(is_end_B1, found_BV, logits_BV) if first else found_BV
        return logits_BV

    def _forward(
        self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, places_B: torch.Tensor
    ) -> torch.Tensor:
        """The logits [B, V] of one place of each row."""
        self._last.wanted(places_B.to(self._device))
        return self._model(
            tokens_BS.to(self._device),
            positions_BS=positions_BS.to(self._device),
            # Of dropout, which there is none of here.
            keys_B=torch.zeros(len(tokens_BS), dtype=torch.int64, device=self._device),
        )[:, 0]


def _column(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers)[:, None]


_INCOMPLETE = "\ufffd"
"""What bytes decode to that are not yet a character."""


class TextStream:
    """Writes what tokens add to a text once it is sure: a character may have several tokens, and
    how a token decodes may depend on the one before."""

    def __init__(self, tokenizer: Tokenizer, out: TextIO) -> None:
        self._tokenizer, self._out = tokenizer, out
        self._ids: list[int] = []
        """Of the line so far, and the one before it."""
        self._written = 0
        """Characters of their text."""

    def take(self, token: int) -> None:
        """One more token."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(_INCOMPLETE):
            return
        self._write(text)
        if text.endswith("\n"):
            # Else each token would take longer than the one before.
            self._ids = [token]
            self._written = len(self._tokenizer.decode(self._ids))

    def close(self) -> None:
        """The text is at its end: write what was held back."""
        self._write(self._tokenizer.decode(self._ids))

    def _write(self, text: str) -> None:
        self._out.write(text[self._written :])
        self._out.flush()
        self._written = len(text)
