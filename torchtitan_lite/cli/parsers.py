"""The options of every command.

The commands themselves import torch, which takes seconds; parsing, `--help` and completion must not
depend on it.
"""

import argparse
import os
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.urls import local_path
from torchtitan_lite.fault_tolerance.lighthouse.rules import QuorumSettings

PROGRAM = "torchtitan-lite"
DTYPES = ("bf16", "fp16", "fp32")
"""Data types of converted weights."""
DEVICES = ("a100", "b200", "h100", "h100-nvl", "h100-pcie", "h200", "l40s", "cpu")
"""Devices of `estimate`: the accelerators of `device.py`, which imports torch, and the CPU."""
_CHECKPOINT = (
    'CHECKPOINT is the folder of a step (".../step-1000"), or of a run or its checkpoints,\n'
    "whose newest step is used"
)
_SERVING = (
    "bind",
    "min_replicas",
    "join_timeout_ms",
    "heartbeat_timeout_ms",
    "sole",
    "serve_torchft",
)
"""Options of a coordinator that serves."""
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class Parser(argparse.ArgumentParser):
    """Parser that reports an invalid command line in one line, with status 2, and suggests what a
    mistyped option or command may have meant."""

    def __init__(self, **options) -> None:
        options.setdefault("allow_abbrev", False)
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        self._commands: Iterable[str] = ()
        self._words: Sequence[str] = ()
        super().__init__(**options)

    def add_subparsers(self, **options):
        commands = super().add_subparsers(**options)
        self._commands = commands.choices
        return commands

    def parse_known_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        self._words = list(args or ())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        words = ((word, self.meant_by(word)) for word in self._words)
        hints = (f" Did you mean {meant} instead of {word}?" for word, meant in words if meant)
        hint = next(hints, "")
        self.exit(2, f"{self.prog}: {message}.{hint} --help lists the options.\n")

    @property
    def options(self) -> list[str]:
        """All options, such as "--nproc"."""
        return list(self._option_string_actions)

    def meant_by(self, word: str) -> str | None:
        """Return the option, or the command, that an unknown word of the command line resembles;
        None for a known word and if there is none."""
        if word.startswith("--"):
            return similar_option(word, self.options)
        if self._words[:1] != [word] or word in self._commands:
            return None
        return next(iter(get_close_matches(word, self._commands, n=1)), None)


def similar_option(word: str, options: Iterable[str]) -> str | None:
    """Return the option that an unknown one resembles; None for a known one, for a key of the
    configuration, and if there is none."""
    name = word.partition("=")[0].removeprefix("--")
    known = {option.removeprefix("--"): option for option in options}
    if name in known or "." in name:
        return None
    return next((known[match] for match in get_close_matches(name, known, n=1)), None)


def train_parser() -> Parser:
    """Return the parser of the options of `train` alone."""
    top = Parser(prog=PROGRAM)
    return _train(top.add_subparsers(parser_class=Parser))


def parser() -> Parser:
    """Return the parser of all commands. Each sets `module` and `function`, which implement it,
    `passes_on` if it accepts `--section.key value` too, and `check`, which ends with an error for
    options that cannot be combined."""
    top = Parser(
        prog=PROGRAM,
        description="Fault-tolerant distributed training of language models on PyTorch.",
        epilog=f"{PROGRAM} COMMAND --help describes a command.",
    )
    top.add_argument("--version", action="store_true", help="print the versions and exit")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    _train(commands)
    _resize(commands)
    _coordinator(commands)
    _launch(commands)
    _generate(commands)
    _subscribe(commands)
    _evaluate(commands)
    _convert(commands)
    _estimate(commands)
    _inspect(commands)
    _report(commands)
    _completion(commands)
    return top


def _add(
    commands,
    name: str,
    summary: str,
    description: str,
    *,
    module: str,
    former_names: Sequence[str] = (),
    **defaults,
) -> Parser:
    parser = commands.add_parser(
        name, aliases=former_names, help=summary, description=f"{summary}\n\n{description}"
    )
    defaults = {"function": "run", "passes_on": False, "check": None, **defaults}
    parser.set_defaults(parser=parser, module=f"torchtitan_lite.cli.{module}", **defaults)
    return parser


def _train(commands) -> Parser:
    train = _add(
        commands,
        "train",
        "Train a model from one TOML file.",
        "torchtitan-lite train [--nproc N] [--replicas R] [--spares K] --config FILE "
        "[--section.key value ...]\n"
        "torchtitan-lite train --nproc N --nnodes M --rdzv-endpoint HOST:PORT --config FILE ...\n"
        "torchrun --nproc-per-node N train.py --config FILE [--section.key value ...]\n"
        "torchtitan-lite train --help [SECTION ...]",
        module="train",
        passes_on=True,
    )
    # Read by cli.train_options, because every other argument belongs to the configuration.
    train.add_argument(
        "--nproc", metavar="N", help='processes to start on this machine; "auto": one per GPU'
    )
    train.add_argument(
        "--replicas",
        metavar="R",
        help="copies of the training that share the batch, of N processes each (with --nnodes: of "
        "M/R machines); one that fails rejoins while the others train on (default 1)",
    )
    train.add_argument(
        "--spares",
        metavar="K",
        help="warm processes that wait to take the place of a rank that dies, while the other "
        "ranks keep their processes (default 0: a dead rank ends the run)",
    )
    train.add_argument(
        "--nnodes",
        metavar="M",
        help="machines that train together (default 1); further ones that join are spare machines",
    )
    train.add_argument(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="address of `torchtitan-lite coordinator`, through which the machines find each other",
    )
    train.add_argument(
        "--rdzv-id",
        metavar="ID",
        help='name of the run, the same on all machines (default "default")',
    )
    train.add_argument(
        "--rdzv-timeout-s",
        metavar="S",
        help="seconds to wait until enough machines have joined, at the start and when one is lost "
        "(default 600)",
    )
    train.add_argument("--config", metavar="FILE", help="the TOML file")
    return train


def _resize(commands) -> None:
    resize = _add(
        commands,
        "resize",
        "Change the number of ranks or the mesh of a live run, without a restart.",
        "torchtitan-lite resize RUN --nproc N [--parallelism.key value ...]\n\n"
        "RUN is the output folder of `train --spares K` or `launch` on this machine,\n"
        "or of `train --rdzv-endpoint`: then on any machine that trains, and for all of them.\n"
        "Processes that stay keep their process ids; the state moves to the new mesh through\n"
        "shared memory. Keys that can change are those of [parallelism], and\n"
        "training.local_batch_size; omitted ones have the values with which the run was started.\n"
        "If the new mesh fails before its first step, the run returns to the former one.",
        module="resize",
        passes_on=True,
    )
    add = resize.add_argument
    add("run", type=Path, help="output folder of the run")
    per = "number of ranks, of each replica or each machine if there are several"
    add("--nproc", type=positive, required=True, help=per)
    add(
        "--timeout",
        type=positive,
        default=300,
        metavar="S",
        help="seconds to wait for the first step on the new mesh (default: %(default)s)",
    )


def _coordinator(commands) -> None:
    coordinator = _add(
        commands,
        "coordinator",
        "Serve the machines and the replicas of a run: which of them train, and which are spare.",
        "torchtitan-lite coordinator --bind HOST:PORT [--min-replicas N]\n"
        "torchtitan-lite coordinator --status HOST:PORT [--json]\n\n"
        "The machines run `train --nnodes M --rdzv-endpoint HOST:PORT`. It is the lighthouse of\n"
        "their replicas, and of those that torchrun starts with\n"
        "TORCHFT_LIGHTHOUSE=http://HOST:PORT: it forms the quorum of each step.\n"
        "TORCHTITAN_LITE_TOKEN is the secret that all of them share with it. It keeps nothing on\n"
        "disk: started again at the same address, it continues. SIGTERM or Ctrl-C ends it.\n\n"
        "If two serve a run, the one decides that a majority of the machines has acknowledged (of\n"
        "eight machines, if there are more). If more than half of them are lost at once, none\n"
        "does, and the run waits for them: --sole continues without them.",
        module="coordinator",
        former_names=("rendezvous",),
        check=_check_coordinator,
    )
    default = QuorumSettings()
    add = coordinator.add_argument
    add(
        "--bind",
        default="127.0.0.1:29520",
        metavar="HOST:PORT",
        help="where to listen: an address that the machines reach, on a private network; port 0: a "
        "free one (default: %(default)s)",
    )
    add(
        "--min-replicas",
        type=int,
        default=default.min_replicas,
        metavar="N",
        help="minimum number of replicas for a quorum (default: %(default)s)",
    )
    add(
        "--join-timeout-ms",
        type=int,
        default=default.join_timeout_ms,
        metavar="MS",
        help="how long a quorum waits for live replicas that have not joined (default: "
        "%(default)s)",
    )
    add(
        "--heartbeat-timeout-ms",
        type=int,
        default=default.heartbeat_timeout_ms,
        metavar="MS",
        help="how long after its last heartbeat a replica counts as dead (default: %(default)s)",
    )
    add(
        "--sole",
        action="store_true",
        help="decide without a majority of the machines: safe only if no other coordinator serves "
        "the run, as with a Kubernetes StatefulSet",
    )
    add(
        "--serve-torchft",
        action="store_true",
        help="serve the managers of trainers that are written on torchft, and nothing else: "
        "without authentication, for a private network",
    )
    add(
        "--status",
        metavar="HOST:PORT",
        help="print what the coordinator at this address knows of machines and replicas, and exit",
    )
    add("--json", action="store_true", help="print the status as JSON")


def _check_coordinator(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Exit with an error for options that cannot be combined."""
    parser: Parser = options.parser
    if options.status is not None:
        for name in _SERVING:
            if getattr(options, name) != parser.get_default(name):
                option = "--" + name.replace("_", "-")
                parser.error(f"--status asks another coordinator: omit {option}")
    elif options.json:
        parser.error("--json is the form of --status HOST:PORT, which is missing")
    if options.serve_torchft and options.sole:
        parser.error("--serve-torchft serves no machines, about which --sole decides: omit one")


def _launch(commands) -> None:
    launch = _add(
        commands,
        "launch",
        "Train with several replicas on this machine; a failed one restarts and rejoins.",
        "torchtitan-lite launch --replicas 2 --nproc-per-replica 2 -- --config llama.toml\n\n"
        "Arguments after -- are those of `train`. A rank that dies or hangs is replaced and its\n"
        "replica restarts in the processes of the others, while the other replicas train on; with\n"
        "--spares, by a process that is ready. SIGTERM or Ctrl-C:\n"
        "all replicas save and leave; a second Ctrl-C kills them. Exit status 0: all replicas\n"
        "finished or left; 1: a replica failed permanently or was killed; 2: invalid command line\n"
        "or config.",
        module="launch",
    )
    add = launch.add_argument
    add("--replicas", type=int, required=True, help="number of replicas")
    add(
        "--nproc-per-replica",
        default="1",
        metavar="RANKS",
        help="processes per replica (default 1); 1:4 (from 1 to 4) or 1,2,4: the largest of these "
        "that every replica can have, resized when that changes",
    )
    add(
        "--spares",
        type=int,
        default=0,
        help="spare processes per replica, which have imported everything; one takes the place of "
        "a rank that dies or hangs, and the other ranks keep their processes (default 0)",
    )
    add(
        "--slots-file",
        type=Path,
        metavar="FILE",
        help='how many processes each replica has room for now, as {"0": 2, "1": 1}; may change at '
        "any time",
    )
    add(
        "--regrow-after-s",
        type=float,
        default=600.0,
        help="seconds after which a process that died three times in a row is tried again, where "
        "--nproc-per-replica allows fewer; doubles each time (default 600)",
    )
    add(
        "--lighthouse",
        choices=("builtin", "torchft"),
        default="builtin",
        help="which lighthouse forms the quorums (default builtin, which is notified of a death at "
        "once)",
    )
    add("--min-replicas", type=int, default=1, help="minimum replicas for a quorum (default 1)")
    add("--max-restarts", type=int, default=10, help="restarts of a replica in a row (default 10)")
    add(
        "--max-restart-delay-s",
        type=float,
        default=30.0,
        help="limit of the delay before a restart, which doubles each time (default 30)",
    )
    add("--log-dir", type=Path, help="default: launch_logs in job.dump_folder of the run")
    add(
        "--bind",
        help="address on which the lighthouse listens (default 127.0.0.1, or ::1 without IPv4)",
    )
    add("--grace-s", type=float, default=30.0, help="seconds to save and leave (default 30)")


def _generate(commands) -> None:
    generate = _add(
        commands,
        "generate",
        "Generate text from a checkpoint.",
        "torchtitan-lite generate CHECKPOINT --prompt TEXT [--prompt TEXT ...]\n"
        "torchrun --nproc-per-node 2 -m torchtitan_lite generate CHECKPOINT --prompt-file FILE\n\n"
        f"{_CHECKPOINT}, or a Hugging Face folder. Under\n"
        "torchrun the processes share the model by tensor parallelism; where it cannot be sharded\n"
        "over all of them, they hold copies and share the prompts.",
        module="generate",
        passes_on=True,
    )
    add = generate.add_argument
    add("checkpoint", help="folder of a run, of its checkpoints or of a step, or of Hugging Face")
    _add_ema(generate)
    add("--prompt", action="append", default=[], help="start of a text; several make a batch")
    add("--prompt-file", type=Path, help="file with one prompt per line")
    add(
        "--chat",
        action="store_true",
        help="each prompt is a user's message, which the assistant answers: apply the chat "
        "template of the tokenizer's folder",
    )
    add("--system", metavar="TEXT", help="with --chat: the system's message")
    add("--max-new-tokens", type=positive, default=128, help="default: %(default)s")
    add("--temperature", type=float, default=0.7, help="0 is greedy (default: %(default)s)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the smallest set of tokens with this probability (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="seed of the sampling (default: %(default)s)")
    add("--num-samples", type=positive, default=1, help="texts per prompt (default: %(default)s)")
    add(
        "--dtype",
        choices=("float64", "float32", "bfloat16"),
        help="data type of the computation (default: that of the files)",
    )
    _add_device(generate)
    add(
        "--tensor-parallel",
        type=positive,
        help="processes that share one copy of the model (default: as many as possible)",
    )
    add("--tokenizer", help="folder of tokenizer.json (default: that of the checkpoint's run)")
    add("--json", type=Path, help="also write prompts, texts and ids to this file")
    add(
        "--subscribe",
        metavar="SOURCE",
        help="generate again with each version of the weights that a run publishes: its output "
        "folder, or the URL of its first rank",
    )
    add("--versions", type=positive, help="with --subscribe: end after so many versions")
    _add_custom_import(generate)


def _subscribe(commands) -> None:
    subscribe = _add(
        commands,
        "subscribe",
        "Receive the weights of a running training job as they change.",
        "torchtitan-lite subscribe SOURCE [--out FOLDER] [--versions N]\n\n"
        "SOURCE is the output folder of a run with --publish.enable, or the URL of its\n"
        "first rank. Each version that arrives is one line; with --out it is also written to\n"
        "FOLDER/version-N, a Hugging Face folder, which appears once it is complete.",
        module="subscribe",
    )
    add = subscribe.add_argument
    add("source", help="output folder of the run, or http://HOST:PORT of its first rank")
    add("--out", type=Path, help="write each version as a Hugging Face folder below this one")
    add("--keep", type=positive, default=2, help="versions to keep in --out (default: %(default)s)")
    add("--versions", type=positive, help="end after so many versions (default: with the run)")
    add(
        "--timeout",
        type=positive,
        default=60,
        help="end if no version arrives for so many seconds (default: %(default)s)",
    )


def _evaluate(commands) -> None:
    evaluate = _add(
        commands,
        "evaluate",
        "Measure the loss of a checkpoint on a data set.",
        "torchtitan-lite evaluate CHECKPOINT [--dataset NAME] [--section.key value ...]\n"
        "torchrun --nproc-per-node 2 -m torchtitan_lite evaluate CHECKPOINT ...\n\n"
        "CHECKPOINT as for `generate`. With a data set, every token of every document is a target\n"
        "once, and each document is evaluated separately. Without one: the run's\n"
        "validation set, packed as in training. Keys of [validation], [training] and\n"
        "[parallelism] are accepted as for `train`; the model is that of the checkpoint.",
        module="evaluate",
        passes_on=True,
    )
    add = evaluate.add_argument
    add("checkpoint", help="folder of a run, of its checkpoints or of a step, or of Hugging Face")
    _add_ema(evaluate)
    add("--dataset", help='such as "python_stdlib", "c4_validation", or a name on the hub')
    add("--dataset-path", help="a local file, folder or glob")
    add("--dataset-config", help="configuration (subset) of a data set on the hub")
    add("--dataset-split", help="split of a data set on the hub")
    add("--text-column", help="text column")
    add("--seq-len", help="tokens per window (default: as in the run)")
    add(
        "--stride",
        type=positive,
        metavar="N",
        help="new targets per further window of a document (default: --seq-len with a data set, "
        "else packed blocks as in the run); fewer: more context for each",
    )
    add("--batch-size", help="samples per rank and batch")
    add("--steps", help="batches per rank (default: the whole data set)")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="data type of the computation (default: as in the run)",
    )
    _add_device(evaluate)
    add("--tokenizer", help="folder of tokenizer.json (default: that of the run)")
    add("--json", type=Path, help="also write the numbers to this file")
    _add_custom_import(evaluate)


def _convert(commands) -> None:
    convert = commands.add_parser(
        "convert",
        help="Convert weights and checkpoints from and to Hugging Face and torch DCP.",
        description="Convert weights and checkpoints from and to Hugging Face and torch DCP.",
    )
    kinds = convert.add_subparsers(dest="kind", metavar="KIND", required=True, parser_class=Parser)
    from_hf = _add(
        kinds,
        "from-hf",
        "Hugging Face folder -> checkpoint, without holding the model in memory.",
        "The weights go to OUT_DIR/step-0, which checkpoint.initial_load_path can name; tokenizer\n"
        "and settings go to OUT_DIR/assets. An interrupted conversion continues when restarted.",
        module="convert",
        function="from_hugging_face",
    )
    from_hf.add_argument("hf_dir", type=_folder, help="the folder with config.json")
    from_hf.add_argument("out_dir", help="folder or URL in which step-0 is written")
    from_hf.add_argument(
        "--mtp-depth",
        type=int,
        default=0,
        metavar="N",
        help="import N layers of multi-token prediction too (default: 0), for runs with "
        "model.mtp_depth = N",
    )
    _add_conversion(from_hf)
    to_hf = _add(
        kinds,
        "to-hf",
        "Checkpoint -> Hugging Face folder, which transformers loads.",
        f"{_CHECKPOINT}. It records its model.\n"
        "Tokenizer and generation settings come from the run's tokenizer folder, or from\n"
        "--assets. An interrupted conversion continues when restarted.",
        module="convert",
        function="to_hugging_face",
    )
    to_hf.add_argument("checkpoint", help="folder of a run, of its checkpoints or of a step")
    to_hf.add_argument("out_dir", type=_folder, help="a folder that does not exist yet")
    _add_ema(to_hf)
    to_hf.add_argument("--max-shard-size", type=size, default="5GB", help="(default: 5GB)")
    to_hf.add_argument("--assets", type=_folder, help="folder with the tokenizer's files")
    to_hf.add_argument(
        "--drop-expert-bias",
        action="store_true",
        help="omit the bias that balances the experts, which transformers does not have",
    )
    to_hf.add_argument(
        "--merge",
        action="store_true",
        help="merge adapters (LoRA) into the weights that they were trained with; by default they "
        "are written alone, as PEFT loads them",
    )
    to_hf.add_argument(
        "--base", metavar="DIR", help="where these weights are now, if they were moved"
    )
    _add_conversion(to_hf)
    from_dcp = _add(
        kinds,
        "from-dcp",
        "torch DCP checkpoint with torchtitan's names -> checkpoint.",
        "The configuration names the model: [model] name and flavor. OUT_DIR may be the\n"
        "checkpoint folder of a new run, or any other for checkpoint.initial_load_path.",
        module="convert",
        function="from_dcp",
        passes_on=True,
    )
    from_dcp.add_argument("dcp_dir", type=Path, help="the folder with .metadata")
    from_dcp.add_argument("out_dir", help="folder or URL in which step-N is written")
    to_dcp = _add(
        kinds,
        "to-dcp",
        "Checkpoint -> torch DCP checkpoint with torchtitan's names.",
        f"{_CHECKPOINT}. It records its model.",
        module="convert",
        function="to_dcp",
    )
    to_dcp.add_argument("checkpoint", help="folder of a run, of its checkpoints or of a step")
    to_dcp.add_argument("out_dir", type=Path, help="a folder without a checkpoint")
    to_dcp.add_argument(
        "--torchtitan",
        choices=("0.2", "0.3"),
        default="0.3",
        help="release whose names to use (default: %(default)s)",
    )
    _add_custom_import(to_dcp)


def _estimate(commands) -> None:
    estimate = _add(
        commands,
        "estimate",
        "Predict memory, communication and time of a step on any number of ranks.",
        "torchtitan-lite estimate --config FILE --world-size N [--section.key value ...]\n"
        "torchtitan-lite estimate --failures [--ranks N,N,...] [--set NAME=VALUE ...]\n\n"
        "One process traces the step of one rank on tensors without memory; no GPU is needed.\n"
        "It traces other meshes too, in search of the fastest one that fits (--no-search: none).\n"
        "With --failures: simulate how much of the time remains for training when ranks and\n"
        "machines fail, for several strategies of recovery.\n"
        "Exit status 1: the configured step does not fit the device; 2: the command failed.",
        module="estimate",
        passes_on=True,
        check=_check_estimate,
    )
    add = estimate.add_argument
    add("--config", type=Path, metavar="FILE", help="the TOML file")
    add("--world-size", type=positive, metavar="N", help="number of ranks")
    add(
        "--device",
        choices=DEVICES,
        default="h200",
        help='device of each rank (default: %(default)s); "cpu": memory only',
    )
    add("--all-layers", action="store_true", help="trace all layers of each mesh, instead of a few")
    add(
        "--no-search",
        dest="search",
        action="store_false",
        help="trace only the configured mesh, instead of searching for the best one",
    )
    add("--memory-plot", type=Path, metavar="FILE", help="write memory over the step as SVG")
    add("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    add = estimate.add_argument_group("with --failures").add_argument
    add(
        "--failures",
        dest="module",
        action="store_const",
        const="torchtitan_lite.cli.failures",
        help="predict goodput under failures instead of a step",
    )
    add(
        "--ranks",
        type=_numbers,
        metavar="N,N,...",
        default=_numbers("8,64,512,4096,32768,100000"),
        help="numbers of ranks (default: 8,64,512,4096,32768,100000)",
    )
    add(
        "--set",
        type=_assignment,
        action="append",
        metavar="NAME=VALUE",
        default=[],
        help="override an input, such as mtbf_h=20000; the output lists all",
    )
    add("--trace", type=Path, metavar="FILE", help="replay a trace of machines (Oobleck's format)")
    add(
        "--published",
        action="store_true",
        help="compare the model with results that others have published, and nothing else",
    )
    add(
        "--num-failures",
        type=positive,
        metavar="N",
        default=1000,
        help="failures to simulate for each number of ranks (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="seed of the failures (default: %(default)s)")
    add("--failure-plot", type=Path, metavar="FILE", help="write goodput over ranks as SVG")


def _check_estimate(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Exit with an error for options that cannot be combined."""
    if options.module.endswith(".failures"):
        if arguments:
            options.parser.error(f"unrecognized arguments: {' '.join(arguments)}")
        others = (options.set, options.trace, options.json, options.failure_plot)
        if options.published and any(others):
            options.parser.error(
                "--published has its own inputs and output: omit --set, --trace, --json and "
                "--failure-plot"
            )
    elif options.config is None or options.world_size is None:
        options.parser.error("--config and --world-size are required, or --failures")


def _inspect(commands) -> None:
    inspect = _add(
        commands,
        "inspect",
        "Show the contents of a checkpoint, verify it, or list snapshots in shared memory.",
        "torchtitan-lite inspect PATH [--verify] [--tensors] [--json]\n"
        "torchtitan-lite inspect --shm [--free [RUN_ID] [--yes]] [--json]\n\n"
        "PATH is the folder or URL of a step, of a run's checkpoints, or of the run: then all of\n"
        "its steps. Exit status 1: damage was found; 2: the command failed.",
        module="inspect",
    )
    add = inspect.add_argument
    add("path", nargs="?", help="folder or URL of a run, of its checkpoints or of a step")
    add("--verify", action="store_true", help="read everything and compare all checksums")
    add("--tensors", action="store_true", help="list the tensors")
    add("--shm", action="store_true", help="list the snapshots that runs left in shared memory")
    add(
        "--free",
        nargs="?",
        const="",
        metavar="RUN_ID",
        help="with --shm: free the snapshots of that run; if RUN_ID is omitted, those of all runs "
        "that no process writes to, after confirmation",
    )
    add("--yes", action="store_true", help="with --free: do not ask")
    add("--json", action="store_true", help="print JSON")
    _add_custom_import(inspect)


def _report(commands) -> None:
    report = _add(
        commands,
        "report",
        "Write one self-contained HTML page about one or more runs.",
        "torchtitan-lite report RUN [RUN ...]\n\n"
        "Exit status 1: the runs differ by more than --fail-above or end at different steps, or a "
        "sample was lost or used twice; 2: there is no report.",
        module="report",
    )
    add = report.add_argument
    add(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="dump folder of a run (job.dump_folder), or its checkpoints; all others are compared "
        "with the first",
    )
    add("--output", type=Path, metavar="FILE", help="default: report.html in the first RUN")
    add(
        "--fail-above",
        type=float,
        metavar="X",
        help="exit with status 1 if loss or gradient norm of any run differ from the first by more "
        "than X, relative, at any common step, or if their last committed steps differ",
    )
    add(
        "--check-samples",
        action="store_true",
        help="write no page, but check from the sample ledgers of each RUN (debug.sample_ledger = "
        "true) that every sample was used exactly once, and exit with status 1 if not",
    )


def _completion(commands) -> None:
    completion = _add(
        commands,
        "completion",
        "Print a completion script for a shell.",
        'eval "$(torchtitan-lite completion bash)"',
        module="completion",
    )
    completion.add_argument("shell", choices=("bash", "zsh"))


def _add_custom_import(parser: Parser) -> None:
    parser.add_argument(
        "--custom-import",
        metavar="MODULE",
        help="module that registers the model family, the optimizer or the storage, as "
        "experimental.custom_import; the name that a checkpoint records is not imported",
    )


def _add_ema(parser: Parser) -> None:
    parser.add_argument(
        "--ema",
        action="store_true",
        help="use the moving average of the weights (optimizer.ema_decay)",
    )


def _add_device(parser: Parser) -> None:
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s"
    )


def _add_conversion(parser: Parser) -> None:
    parser.add_argument(
        "--dtype", choices=DTYPES, help="data type of the written weights (default: unchanged)"
    )
    parser.add_argument(
        "--workers",
        type=positive,
        default=len(os.sched_getaffinity(0)),
        help="files written at the same time (default: the number of cores, %(default)s)",
    )
    _add_custom_import(parser)


def positive(text: str) -> int:
    """Parse an integer of at least 1. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def _assignment(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def _folder(text: str) -> Path:
    """Parse a local path and make it absolute. Raises ArgumentTypeError for a URL."""
    try:
        path = local_path(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from None
    if path is None:
        raise argparse.ArgumentTypeError(f"{text} is a URL; a folder on this machine is needed")
    return path.expanduser().absolute()


def size(text: str) -> int:
    """Parse a number of bytes with a unit, as in transformers ("5GB"). Raises ArgumentTypeError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGT]B)", text.upper())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2]])
