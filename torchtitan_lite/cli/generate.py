"""`torchtitan-lite generate`. Layer: below cli."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from torchtitan_lite.data.chat_prompt import ChatPrompt, chat_prompt
from torchtitan_lite.data.chat_template import find_template
from torchtitan_lite.data.tokenizer import Tokenizer, check_vocab_size
from torchtitan_lite.device import detect_device
from torchtitan_lite.errors import UserError
from torchtitan_lite.host_collectives import all_gather_bytes, all_gather_ints
from torchtitan_lite.inference import (
    BatchGenerator,
    Prompt,
    Sampling,
    TextStream,
    check_prompts,
    open_weights,
    prompt_ids,
    serve,
    stop_ids,
    tokenizer_of,
)
from torchtitan_lite.log import configure_logging, log_once, logger
from torchtitan_lite.mesh import Mesh, start_mesh
from torchtitan_lite.publish import Subscriber, Target
from torchtitan_lite.rpc.authentication import TOKEN
from torchtitan_lite.schema.comm import CommConfig
from torchtitan_lite.schema.parallelism import ParallelismConfig
from torchtitan_lite.train_state import model_tensors

_MAX_WAIT_S = 60
"""Limit of the wait for the next version."""


@dataclass(frozen=True)
class Text:
    """A generated text."""

    prompt: str
    text: str
    ids: list[int]
    ended_by: str
    """"stop" (the end of a document) or "length"."""


def run(options: argparse.Namespace, others: Sequence[str]) -> int:
    """Generate according to `options`. Returns the exit status."""
    if any(other.startswith("--parallelism.") for other in others):
        options.parser.error(
            f"{' '.join(others)}: text is generated under tensor parallelism alone, neither under "
            "a pipeline nor under context parallelism; give --tensor-parallel N"
        )
    if others:
        options.parser.error(f"unrecognized arguments: {' '.join(others)}")
    if not options.prompt and options.prompt_file is None:
        options.parser.error("no prompt: give --prompt TEXT or --prompt-file FILE")
    if options.system is not None and not options.chat:
        options.parser.error("--system is a message of a chat: add --chat")
    configure_logging()
    try:
        with start_mesh(ParallelismConfig(), CommConfig(), detect_device(options.device)) as mesh:
            for texts, seconds in generate(options, mesh):
                if mesh.is_leader:
                    _print(options, texts, seconds)
    except (UserError, OSError) as error:
        log_once(error)
        return 1
    return 0


def generate(options: argparse.Namespace, world: Mesh) -> Iterator[tuple[list[Text], float]]:
    """Yield the text of each prompt, on every rank, and the seconds it took after the model was
    loaded: once, or with each version of the weights to which `options` subscribe. Every rank must
    call it."""
    sampling = Sampling(temperature=options.temperature, top_p=options.top_p, seed=options.seed)
    requested = [prompt for prompt in _prompts(options) for _ in range(options.num_samples)]
    weights = open_weights(options.checkpoint, world, ema=options.ema)
    files = tokenizer_of(weights, options.tokenizer)
    tokenizer = files.load()
    check_vocab_size(files.folder, tokenizer.vocab_size, weights.spec.vocab_size)
    stops = stop_ids(tokenizer, files.folder)
    if options.chat:
        chats = _chat_prompts(options.system, requested, tokenizer, files.folder)
        stops = stops.union(*(one.stop_ids for one in chats))
        ids = [one.ids for one in chats]
    else:
        ids = [prompt_ids(tokenizer, text) for text in requested]
    prompts = [Prompt(one, sample=number % options.num_samples) for number, one in enumerate(ids)]
    check_prompts(prompts, weights.spec)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    model, mesh = serve(weights, world, dtype=dtype, tensor_parallel=options.tensor_parallel)
    generator = BatchGenerator(model, weights.spec, mesh)

    def texts() -> tuple[list[Text], float]:
        on_token, stream = _ignore, None
        if len(requested) == 1 and mesh.is_leader:
            # A single text is streamed.
            stream = TextStream(tokenizer, sys.stdout)
            sys.stdout.write("" if options.chat else requested[0])
            on_token = _streamed(stream)
        own = slice(mesh.batch_rank, None, mesh.degrees.batch)
        begin = time.perf_counter()
        results = generator.generate(
            prompts[own],
            max_new_tokens=options.max_new_tokens,
            sampling=sampling,
            stop_ids=stops,
            on_token=on_token,
        )
        world.barrier()
        seconds = time.perf_counter() - begin
        if stream is not None:
            stream.close()
        own_texts = [
            asdict(
                Text(text, tokenizer.decode(one.ids), one.ids, "stop" if one.stopped else "length")
            )
            for text, one in zip(requested[own], results, strict=True)
        ]
        is_first = mesh.device_mesh.get_local_rank("tp") == 0
        gathered = all_gather_bytes(json.dumps(own_texts).encode() if is_first else b"")
        copies = [json.loads(text) for text in gathered if text]
        return [
            Text(**copies[number % len(copies)][number // len(copies)])
            for number in range(len(requested))
        ], seconds

    for _ in _versions(options, model, mesh):
        yield texts()


def _chat_prompts(
    system: str | None, texts: Sequence[str], tokenizer: Tokenizer, folder: Path
) -> list[ChatPrompt]:
    """Return the prompts in which each text is a user's message. Raises DataError."""
    template = find_template(folder)
    before = [] if system is None else [{"role": "system", "content": system}]
    return [
        chat_prompt(tokenizer, template, [*before, {"role": "user", "content": text}])
        for text in texts
    ]


def _versions(options: argparse.Namespace, model: nn.Module, mesh: Mesh) -> Iterator[int]:
    """Yield once the model holds another version of the weights, which does not change until the
    next one is asked for: texts are generated by one version. Without a subscription, yield 0, the
    weights of the checkpoint."""
    if options.subscribe is None:
        yield 0
        return
    with Subscriber(options.subscribe, secret=os.environ.get(TOKEN, "")) as subscriber:
        held = {
            name.removeprefix("model."): mesh.to_dtensor(tensor)
            for name, tensor in model_tensors(model).items()
        }
        subscription = subscriber.subscribe(Target(name, tensor) for name, tensor in held.items())
        num_versions = 0
        while options.versions is None or num_versions < options.versions:
            update = subscription.update(
                timeout_s=_MAX_WAIT_S, agree=lambda number: min(all_gather_ints(number))
            )
            if update is None:
                logger.info("No further version within %d s. %s", _MAX_WAIT_S, subscription.problem)
                return
            num_versions += 1
            logger.info("Version %d, received in %.3f s", update.version, update.seconds)
            yield update.version


def _ignore(number: int, token: int) -> None:
    """Discard a token: no text is streamed."""


def _streamed(stream: TextStream) -> Callable[[int, int], None]:
    return lambda number, token: stream.take(token)


def _print(options: argparse.Namespace, texts: Sequence[Text], seconds: float) -> None:
    """Print the texts to stdout, unless streamed, and the speed to stderr."""
    if len(texts) > 1:
        for number, text in enumerate(texts, start=1):
            between = "\n\n" if options.chat else ""
            print(f"--- {number} of {len(texts)}\n{text.prompt}{between}{text.text}")
    else:
        print(flush=True)
    num_tokens = sum(len(text.ids) for text in texts)
    print(
        f"{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.1f} tokens/s",
        file=sys.stderr,
    )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(text) for text in texts], indent=2) + "\n")


def _prompts(options: argparse.Namespace) -> list[str]:
    prompts = list(options.prompt)
    if options.prompt_file is not None:
        prompts += options.prompt_file.read_text().splitlines()
        if not prompts:
            raise UserError(f"{options.prompt_file} is empty: one prompt per line is needed.")
    return prompts
