"""Let a trained model go on with a text.

python -m scripts.generate CHECKPOINT --prompt TEXT [--prompt TEXT ...] [--temperature 0.7] ...
torchrun --nproc-per-node 2 -m scripts.generate CHECKPOINT --prompt-file FILE ...

CHECKPOINT is a step's folder (".../step-1000"), a folder of steps, of which the newest is taken, or
a Hugging Face folder.
Under torchrun the processes share the model by tensor parallelism; where it cannot be cut over all
of them, they hold several copies, which share the prompts.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from torchtitan_lite.data.tokenizer import check_vocab_size
from torchtitan_lite.device import detect_device
from torchtitan_lite.errors import UserError
from torchtitan_lite.generate import prompt_ids
from torchtitan_lite.inference import (
    BatchGenerator,
    Prompt,
    Sampling,
    TextStream,
    check_prompts,
    open_weights,
    serve,
    stop_ids,
    tokenizer_of,
)
from torchtitan_lite.leaving import leave
from torchtitan_lite.log import configure_logging, tell_once
from torchtitan_lite.mesh import Mesh, start_mesh
from torchtitan_lite.messages import gather_texts
from torchtitan_lite.schema.comm import CommConfig
from torchtitan_lite.schema.parallelism import ParallelismConfig

_DTYPES = ("float64", "float32", "bfloat16")


@dataclass(frozen=True)
class Text:
    """What the model made of a prompt."""

    prompt: str
    text: str
    ids: list[int]
    ended_by: str
    """ "stop" (the end of a document) or "length"."""


def main(argv: list[str]) -> int:
    """Entry of the command. Returns the exit status."""
    configure_logging()
    options = options_of(argv)
    try:
        with start_mesh(ParallelismConfig(), CommConfig(), detect_device(options.device)) as mesh:
            texts, seconds = generate(options, mesh)
            if mesh.is_leader:
                _say(options, texts, seconds)
    except (UserError, OSError) as error:
        tell_once(error)
        return 1
    return 0


def generate(options: argparse.Namespace, world: Mesh) -> tuple[list[Text], float]:
    """What became of each prompt, on every rank, and the seconds that it took once the model was
    there. Every rank must call it."""
    sampling = Sampling(temperature=options.temperature, top_p=options.top_p, seed=options.seed)
    wanted = [prompt for prompt in _prompts(options) for _ in range(options.num_samples)]
    weights = open_weights(options.checkpoint, world)
    files = tokenizer_of(weights, options.tokenizer)
    tokenizer = files.load()
    check_vocab_size(files.folder, tokenizer.vocab_size, weights.spec.vocab_size)
    prompts = [
        Prompt(prompt_ids(tokenizer, text), sample=number % options.num_samples)
        for number, text in enumerate(wanted)
    ]
    check_prompts(prompts, weights.spec)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    model, mesh = serve(weights, world, dtype=dtype, tensor_parallel=options.tensor_parallel)
    generator = BatchGenerator(model, weights.spec, mesh)
    heard, stream = _nobody, None
    if len(wanted) == 1 and mesh.is_leader:
        # There is nothing to keep apart, so that it is written as it comes.
        stream = TextStream(tokenizer, sys.stdout)
        sys.stdout.write(wanted[0])
        heard = _listener(stream)
    own = slice(mesh.batch_rank, None, mesh.degrees.batch)
    begin = time.perf_counter()
    found = generator.generate(
        prompts[own],
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        stop_ids=stop_ids(weights, tokenizer),
        heard=heard,
    )
    world.barrier()
    seconds = time.perf_counter() - begin
    if stream is not None:
        stream.close()
    texts = [
        asdict(Text(text, tokenizer.decode(one.ids), one.ids, "stop" if one.stopped else "length"))
        for text, one in zip(wanted[own], found, strict=True)
    ]
    speaks = mesh.device_mesh.get_local_rank("tp") == 0
    told = gather_texts(json.dumps(texts).encode() if speaks else b"")
    copies = [json.loads(text) for text in told if text]
    return [
        Text(**copies[number % len(copies)][number // len(copies)]) for number in range(len(wanted))
    ], seconds


def _nobody(number: int, token: int) -> None:
    """Hears the tokens where nobody else does."""


def _listener(stream: TextStream) -> Callable[[int, int], None]:
    return lambda number, token: stream.take(token)


def _say(options: argparse.Namespace, texts: Sequence[Text], seconds: float) -> None:
    """The texts to stdout, unless they are there; what they took to stderr."""
    if len(texts) > 1:
        for number, text in enumerate(texts, start=1):
            print(f"--- {number} of {len(texts)}\n{text.prompt}{text.text}")
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
            raise UserError(f"{options.prompt_file} is empty: a prompt a line is needed.")
    return prompts


def options_of(argv: Sequence[str]) -> argparse.Namespace:
    """The options of the command line; leaves with SystemExit where they are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("checkpoint", help="a step's folder, a folder of steps, or a Hugging Face one")
    add("--prompt", action="append", default=[], help="what a text begins with; several: a batch")
    add("--prompt-file", type=Path, help="a file with a prompt in each line")
    add("--max-new-tokens", type=_positive, default=128, help="default: %(default)s")
    add("--temperature", type=float, default=0.7, help="0: the likeliest (default: %(default)s)")
    add("--top-p", type=float, default=1.0, help="draw from the likeliest tokens that have this "
        "share of the probability (default: %(default)s)")  # fmt: skip
    add("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    add("--num-samples", type=_positive, default=1, help="texts a prompt (default: %(default)s)")
    add("--dtype", choices=_DTYPES, help="to compute in (default: that of the files)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    add("--tensor-parallel", type=_positive, help="processes that share one copy of the model "
        "(default: as many as can)")  # fmt: skip
    add("--tokenizer", help="folder of tokenizer.json (default: that of the checkpoint's run)")
    add("--json", type=Path, help="write prompts, texts and ids here too")
    options, others = parser.parse_known_args(argv)
    if any(other.startswith("--parallelism.") for other in others):
        parser.error(
            f"{' '.join(others)}: text is generated under tensor parallelism alone, neither under "
            "a pipeline nor under context parallelism. Give --tensor-parallel N"
        )
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if not options.prompt and options.prompt_file is None:
        parser.error("no prompt: give --prompt TEXT or --prompt-file FILE")
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
