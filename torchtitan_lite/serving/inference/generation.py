"""Text generation with a KV cache: prompts are read in chunks, then all sequences advance by one
token per forward."""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self, TextIO

import torch
from torch import nn

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.log import warn_on_rank_0
from torchtitan_lite.data import Tokenizer
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.nn.decoder import OutputProjection
from torchtitan_lite.nn.moe import MoE
from torchtitan_lite.nn.rope import RotaryEmbedding
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.parallel.inference import broadcast_from_first
from torchtitan_lite.serving.inference.kv_cache import KeyValueCache
from torchtitan_lite.serving.inference.sampling import Sampling


class LastPosition:
    """Projects one position per sequence onto the vocabulary: the logits of an entire prompt would
    take more memory than the model."""

    def __init__(self, model: nn.Module) -> None:
        """Make `model` return logits [B, 1, V], until `detach`."""
        self._places_B = torch.zeros(0, dtype=torch.int64)
        self._hooks = [
            module.register_forward_pre_hook(self._take)
            for module in model.modules()
            if isinstance(module, OutputProjection)
        ]

    def detach(self) -> None:
        """Make the model return all logits again."""
        for hook in self._hooks:
            hook.remove()

    def wanted(self, places_B: torch.Tensor) -> None:
        """Set the position of each sequence in the next forward."""
        self._places_B = places_B

    def _take(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_BSD = inputs[0]
        rows_B = torch.arange(len(hidden_BSD), device=hidden_BSD.device)
        return hidden_BSD[rows_B, self._places_B][:, None], *inputs[1:]


_READ_AT_ONCE = 1024
"""Prompt positions per forward. The mask grows with it times the length; more is not faster."""


@dataclass(frozen=True)
class Prompt:
    """A prompt."""

    ids: Sequence[int]
    sample: int = 0
    """Index among the samples of the same prompt, which have different random draws."""


@dataclass
class Generated:
    """A generated continuation."""

    ids: list[int] = field(default_factory=list)
    stopped: bool = False
    """Ended by a stop token, which is not included; else by the length."""


def check_prompts(prompts: Sequence[Prompt], spec: ModelSpec) -> None:
    """Raise ConfigError if a prompt is empty or leaves no position for a new token."""
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
    """A model with its KV cache. As a context manager it leaves the model as it was."""

    def __init__(self, model: nn.Module, spec: ModelSpec, mesh: Mesh) -> None:
        """`model` is from `serve`, and can only generate until `close`."""
        self._model, self._spec, self._mesh = model, spec, mesh
        self._device = mesh.device.torch_device
        self._cache = KeyValueCache(model)
        self._last = LastPosition(model)
        rotaries = [part for part in model.modules() if isinstance(part, RotaryEmbedding)]
        self._rotaries = [rotary for rotary in rotaries if rotary.short_length is not None]
        """Those of which all rotations change where a sequence becomes long."""
        self._restore = ExitStack()
        self._restore.callback(self._cache.detach)
        self._restore.callback(self._last.detach)
        for module in model.modules():
            if isinstance(module, MoE):
                # The expert capacity is a fraction of entire sequences; a single token has none.
                factor = module.capacity_factor
                self._restore.callback(setattr, module, "capacity_factor", factor)
                module.capacity_factor = None

    def close(self) -> None:
        """Leave the model as it was, without a cache."""
        self._restore.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop_ids: Collection[int] = (),
        on_token: Callable[[int, int], None] = lambda index, token: None,
    ) -> list[Generated]:
        """Generate a continuation of each prompt. Every rank of a tp group must call it with the
        same prompts; other groups may have others. `on_token` is called with the index of the
        prompt and the id of each new token. Raises ConfigError for a prompt that is too long."""
        check_prompts(prompts, self._spec)
        if not prompts:
            return []
        lengths = [len(prompt.ids) for prompt in prompts]
        ends = [min(length + max_new_tokens, self._spec.max_seq_len) for length in lengths]
        if max(lengths) + max_new_tokens > self._spec.max_seq_len:
            warn_on_rank_0(
                "Texts end at %d positions, all that %s %s reads, before they have %d new tokens.",
                self._spec.max_seq_len,
                self._spec.name,
                self._spec.flavor,
                max_new_tokens,
            )
        self._cache.allocate(len(prompts), max(ends))
        draws = [sampling.random_draws(prompt.sample) for prompt in prompts]
        generated = [Generated() for _ in prompts]
        active = list(range(len(prompts)))
        logits_BV = self._read(prompts)
        while active:
            ids = broadcast_from_first(sampling.next_ids(logits_BV, draws), self._mesh)
            for index in active:
                sequence = generated[index]
                sequence.stopped = ids[index] in stop_ids
                if not sequence.stopped:
                    sequence.ids.append(ids[index])
                    on_token(index, ids[index])
            active = [
                index
                for index in active
                if not generated[index].stopped
                and lengths[index] + len(generated[index].ids) < ends[index]
            ]
            # An ended sequence keeps its row, so that the others keep theirs.
            places = [
                n + len(sequence.ids) - 1 for n, sequence in zip(lengths, generated, strict=True)
            ]
            if active and self._becomes_long(max(places) + 1):
                self._cache.allocate(len(prompts), max(ends))
                both = zip(prompts, generated, strict=True)
                logits_BV = self._read([Prompt([*p.ids, *sequence.ids]) for p, sequence in both])
            elif active:
                logits_BV = self._forward(
                    _column(ids), _column(places), _column([0] * len(ids))[:, 0]
                )
        return generated

    def _becomes_long(self, length: int) -> bool:
        """Whether sequences of one position less have other rotations, as LongRoPE has."""
        return any(rotary.short_length == length - 1 for rotary in self._rotaries)

    def _read(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Prefill the prompts. Returns the logits after the last token of each."""
        length = max(len(prompt.ids) for prompt in prompts)
        with ExitStack() as restore:
            for rotary in self._rotaries:
                # A chunk has the rotations of the whole.
                restore.callback(setattr, rotary, "length_of", rotary.length_of)
                rotary.length_of = lambda positions_BS: length
            return self._read_chunks(prompts, length)

    def _read_chunks(self, prompts: Sequence[Prompt], length: int) -> torch.Tensor:
        tokens_BS = torch.tensor([[*p.ids, *[0] * (length - len(p.ids))] for p in prompts])
        ends_B = torch.tensor([len(prompt.ids) - 1 for prompt in prompts])
        logits_BV = torch.empty(0)
        for first in range(0, length, _READ_AT_ONCE):
            part_BS = tokens_BS[:, first : first + _READ_AT_ONCE]
            count = part_BS.shape[1]
            positions_BS = torch.arange(first, first + count).expand_as(part_BS)
            places_B = (ends_B - first).clamp(0, count - 1)
            counts_B = (ends_B + 1 - first).clamp(0, count)
            self._cache.set_valid_counts(counts_B.to(self._device))
            found_BV = self._forward(part_BS, positions_BS, places_B)
            is_end_B1 = (ends_B - first == places_B)[:, None].to(self._device)
            logits_BV = torch.where(is_end_B1, found_BV, logits_BV) if first else found_BV
        self._cache.set_valid_counts(None)
        return logits_BV

    def _forward(
        self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, places_B: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits [B, V] of one position per row."""
        self._last.wanted(places_B.to(self._device))
        return self._model(
            tokens_BS.to(self._device),
            positions_BS=positions_BS.to(self._device),
            # Only dropout uses it, which is disabled here.
            rng_keys_B=torch.zeros(len(tokens_BS), dtype=torch.int64, device=self._device),
        )[:, 0]


def _column(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers)[:, None]


_INCOMPLETE = "\ufffd"
"""Decoded from an incomplete character."""


class TextStream:
    """Writes text as its tokens arrive, once it is certain: a character may consist of several
    tokens, and the text of a token may depend on the previous one."""

    def __init__(self, tokenizer: Tokenizer, out: TextIO) -> None:
        self._tokenizer, self._out = tokenizer, out
        self._ids: list[int] = []
        """Ids of the current line and the one before."""
        self._written = 0
        """Characters written of their text."""

    def take(self, token: int) -> None:
        """Add a token."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(_INCOMPLETE):
            return
        self._write(text)
        if text.endswith("\n"):
            # Otherwise each token would take longer than the previous one.
            self._ids = [token]
            self._written = len(self._tokenizer.decode(self._ids))

    def close(self) -> None:
        """Write what was held back."""
        self._write(self._tokenizer.decode(self._ids))

    def _write(self, text: str) -> None:
        self._out.write(text[self._written :])
        self._out.flush()
        self._written = len(text)
