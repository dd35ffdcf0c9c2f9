"""`torchtitan-lite train`, and the entry point of every rank.

With --nproc the configuration is checked once, before any process starts; the ranks receive Ctrl-C
as SIGINT, so that they save and exit. With --spares an agent starts them (`rank_recovery`), which
replaces a rank that dies. With --rdzv-endpoint the agents of several machines run them together
(`rendezvous`).
"""

import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_lite.cli.parsers import similar_option, train_parser
from torchtitan_lite.config import Config, check_live_resize, check_resize_arguments
from torchtitan_lite.config.problems import tables_with
from torchtitan_lite.config.toml_file import read_toml
from torchtitan_lite.core.errors import ConfigError, UserError, exit_status_after
from torchtitan_lite.core.log import configure_logging, log_once, logger
from torchtitan_lite.core.outputs import output_folder
from torchtitan_lite.core.rank.heartbeat import report_early_stop
from torchtitan_lite.core.rank.processes import die_with_parent
from torchtitan_lite.core.rank.supervised import LAUNCHER_PID
from torchtitan_lite.core.run_lease import supervisor_environment
from torchtitan_lite.core.standard_streams import make_streams_patient
from torchtitan_lite.distributed.network import address_for_others, names_loopback
from torchtitan_lite.fault_tolerance.supervision.launcher.local_ranks import run_ranks
from torchtitan_lite.fault_tolerance.supervision.launcher.start_command import TRAIN_OPTIONS
from torchtitan_lite.training.run_config import parse_command_line

if TYPE_CHECKING:
    from torchtitan_lite.fault_tolerance.supervision.launcher.resize_request import (
        RequestInbox,
        ResizeRequest,
    )
    from torchtitan_lite.fault_tolerance.supervision.rank_recovery.worker import RecoveryHooks
    from torchtitan_lite.training.train_state import TrainState
    from torchtitan_lite.training.trainer import Job, StepReport

_PARENT = "TORCHTITAN_LITE_PARENT_PID"
"""Environment variable: the process of --nproc; its ranks die with it."""
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CHANNEL = "TORCHTITAN_LITE_RANK_CHANNEL"
"""Environment variable that `rank_recovery` sets for its processes; its modules import torch."""
_MAX_RESTARTS = 10
"""Replacements of ranks in a row, without 20 s of progress between them."""


def train(argv: Sequence[str]) -> int:
    """Train according to `argv`, in this process or in --nproc processes. Returns the exit
    status."""
    configure_logging(beside_steps=True)
    if _CHANNEL in os.environ:
        return _serve(argv)
    try:
        options, arguments = _split_options(argv)
        is_plain = not options.num_spares and not options.endpoint
        if LAUNCHER_PID in os.environ and is_plain and "RANK" not in os.environ:
            # The launcher has checked the configuration, and reads the status of each rank.
            return _train_ranks(arguments, options.num_ranks)
        if "RANK" in os.environ or (is_plain and options.num_ranks == 1):
            return train_rank(arguments)
        config, _ = _checked(
            [*arguments, *options.resized], options.num_ranks * options.num_machines
        )
        if options.endpoint and config.fault_tolerance.enable:
            raise ConfigError(
                "--rdzv-endpoint is not supported together with fault_tolerance.enable: omit one."
            )
        if options.endpoint:
            return _train_on_machines(arguments, options, config)
        from torchtitan_lite.training.run_folder import check_folder

        check_folder(config)
    except UserError as error:
        log_once(error)
        return exit_status_after(error)
    if options.num_spares:
        return _train_with_spares(arguments, options, config)
    return _train_ranks(arguments, options.num_ranks)


def train_rank(argv: Sequence[str], recovery: "RecoveryHooks | None" = None) -> int:
    """Train as one rank of the world that the environment describes, or alone. `recovery` is that
    of a process which an agent supervises. Returns the exit status."""
    make_streams_patient()
    configure_logging(beside_steps=True)
    _die_with_nproc()
    try:
        config, file = _checked(argv, int(os.environ.get("WORLD_SIZE", "1")))
        _log_about_keys(config, file)
        if config.memory_estimation.enable:
            from torchtitan_lite.cli.estimate import estimate_instead

            return estimate_instead(config)
    except UserError as error:
        log_once(error)
        return _end_with(error, recovery)
    try:
        # Imported once the configuration is known to be right, so that a typo fails fast.
        from torchtitan_lite.core.preemption import StopRequest, stop_on_signals
        from torchtitan_lite.distributed.device import detect_device
        from torchtitan_lite.distributed.mesh import start_mesh
        from torchtitan_lite.training.builders import build
        from torchtitan_lite.training.final_export import export_last_save
        from torchtitan_lite.training.run_folder import hold_folder
        from torchtitan_lite.training.summary import print_end, print_start, report_at_exit
        from torchtitan_lite.training.trainer import train as train_job

        device = detect_device(config.job.device)
        stop = StopRequest() if recovery is None else StopRequest(lambda: recovery.is_leaving)
        interruptible = recovery.interruptible if recovery else nullcontext
        with (
            start_mesh(config.parallelism, config.comm, device, config.job.dump_folder) as mesh,
            recovery.report_failure() if recovery else nullcontext(),
            hold_folder(config, mesh, stays=recovery is not None) as leases,
        ):
            with build(config, mesh, stop, leases=leases) as built, stop_on_signals(stop):
                if recovery is None or os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                    print_start(built, config)
                with report_at_exit(built), interruptible():
                    finished = train_job(_reporting(built.job, recovery))
                if not finished:
                    report_early_stop()
                print_end(built, config, argv, finished=finished)
            if finished and config.checkpoint.last_save_in_hf:
                root, folder = built.job.checkpoints.root, built.data.tokenizer_files.folder
                with interruptible():
                    export_last_save(config, root, folder)
    except UserError as error:
        logger.error("%s", error)
        return _end_with(error, recovery)
    return 0


def _end_with(error: UserError, recovery: "RecoveryHooks | None") -> int:
    """Return the exit status after `error`, which the agent, if there is one, reports too."""
    if recovery is not None:
        recovery.end_reason = str(error).partition("\n")[0]
    return exit_status_after(error)


def _reporting(job: "Job", recovery: "RecoveryHooks | None") -> "Job":
    """Return the job with a hook that reports its first committed step to the agent, if there is
    one."""
    if recovery is None:
        return job

    def hook(state: "TrainState", report: "StepReport") -> None:
        if report.committed:
            recovery.step_committed()

    return replace(job, hooks=[*job.hooks, hook])


def _serve(argv: Sequence[str]) -> int:
    """Train as the rank that the agent assigns to this process. Returns the exit status."""
    _die_with_nproc()
    from torchtitan_lite.fault_tolerance.supervision.rank_recovery.worker import serve

    return serve(
        lambda recovery, changed: train_rank([*argv, *changed], recovery), _import_training
    )


def _import_training() -> None:
    """Import what `train_rank` does."""
    for name in ("builders", "checks.constraints", "final_export", "summary", "trainer"):
        import_module(f"torchtitan_lite.training.{name}")
    # The data imports it when it opens a tokenizer.
    import_module("tokenizers")


def _checked(argv: Sequence[str], world_size: int) -> tuple[Config, Path]:
    config, file = parse_command_line(argv, usage=lambda: train_parser().format_help())
    # Imports torch, so typos in the file are reported before.
    from torchtitan_lite.training.checks.constraints import check_against

    check_against(config, world_size)
    return config, file


def _log_about_keys(config: Config, file: Path) -> None:
    if not logger.isEnabledFor(logging.INFO):
        # Rank 0 logs them.
        return
    from torchtitan_lite.config.keys import without_effect
    from torchtitan_lite.training.checks.torchtitan_file import (
        differing_defaults,
        is_torchtitan_file,
    )

    for line in without_effect(config):
        logger.info("%s", line)
    if is_torchtitan_file(read_toml(file)) and (lines := differing_defaults(config)):
        logger.info(
            "%s is a file of torchtitan: its defaults of %s differ here. See "
            "docs/from_torchtitan.md.",
            file,
            ", ".join(lines),
        )
        for line in lines.values():
            logger.debug("%s", line)


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Options of `train` that are not keys of the configuration."""

    num_ranks: int = 1
    """Ranks per machine."""
    num_spares: int = 0
    """Spare processes per machine."""
    resized: tuple[str, ...] = ()
    """Arguments that a resize has changed, of an agent that the launcher starts again."""
    num_machines: int = 1
    endpoint: str = ""
    """HOST:PORT of the rendezvous; empty for a run on this machine alone."""
    run_id: str = "default"
    join_timeout_s: int = 600
    kept: tuple[str, ...] = ()
    """The words of the options with which the run is resumed, whatever its number of ranks."""


_OPTIONS = {
    "--nproc": "--nproc",
    "--nproc-per-node": "--nproc",
    "--nproc_per_node": "--nproc",
    "--spares": "--spares",
    "--resized": "--resized",
    "--nnodes": "--nnodes",
    "--rdzv-endpoint": "--rdzv-endpoint",
    "--rdzv_endpoint": "--rdzv-endpoint",
    "--rdzv-id": "--rdzv-id",
    "--rdzv_id": "--rdzv-id",
    "--rdzv-timeout-s": "--rdzv-timeout-s",
}
"""Options and their other spellings, which are torchrun's."""


def _split_options(argv: Sequence[str]) -> tuple[_Options, list[str]]:
    """Return the options, and the arguments without them. Raises ConfigError."""
    rest: list[str] = []
    given: dict[str, str] = {}
    arguments = iter(argv)
    for word in arguments:
        name, has_value, value = word.partition("=")
        if name in _OPTIONS:
            given[_OPTIONS[name]] = value if has_value else next(arguments, "")
        else:
            _check_spelling(name)
            rest.append(word)
    if given and "RANK" in os.environ:
        raise ConfigError(
            f"{next(iter(given))} is given, but torchrun has already started the processes: omit "
            "it."
        )
    options = _Options(
        num_ranks=_num_ranks(given.get("--nproc", "1")),
        num_spares=_whole(given, "--spares", 0, least=0),
        resized=_resized(given),
        num_machines=_whole(given, "--nnodes", 1, least=1),
        endpoint=given.get("--rdzv-endpoint", ""),
        run_id=given.get("--rdzv-id", _Options.run_id),
        join_timeout_s=_whole(given, "--rdzv-timeout-s", _Options.join_timeout_s, least=1),
        kept=tuple(
            word
            for name, value in given.items()
            if name not in ("--nproc", "--resized")
            for word in (name, value)
        ),
    )
    _check_endpoint(options, given)
    return options, rest


def _check_spelling(word: str) -> None:
    """Raise ConfigError for a mistyped option. One that is the name of a key without its section is
    reported with the keys."""
    # Only an agent's own.
    known = ["--config", "--help", *(_OPTIONS.keys() - {"--resized"})]
    meant = similar_option(word, known) if word.startswith("--") else None
    if meant and not tables_with(Config, word.removeprefix("--")):
        raise ConfigError(f"{word} is not an option of train. Did you mean {meant}?")


def _resized(given: Mapping[str, str]) -> tuple[str, ...]:
    if "--resized" in given and "--spares" not in given:
        raise ConfigError("--resized is only for runs with --spares: omit it.")
    try:
        return tuple(shlex.split(given.get("--resized", "")))
    except ValueError as error:
        raise ConfigError(f"--resized is no list of arguments: {error}.") from None


def _whole(given: Mapping[str, str], name: str, default: int, *, least: int) -> int:
    value = given.get(name, str(default))
    if not value.isdecimal() or int(value) < least:
        raise ConfigError(f'{name} is "{value}", but must be a number of at least {least}.')
    return int(value)


def _num_ranks(value: str) -> int:
    if value == "auto":
        import torch

        return max(1, torch.cuda.device_count())
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(
            f'--nproc is "{value}", but must be a number of at least 1, or "auto" for one process '
            "per GPU."
        )
    return int(value)


def _check_endpoint(options: _Options, given: Mapping[str, str]) -> None:
    host, _, port = options.endpoint.rpartition(":")
    if "--rdzv-endpoint" in given and not (host and port.isdecimal()):
        raise ConfigError(
            f'--rdzv-endpoint is "{options.endpoint}", but must be HOST:PORT, such as '
            "10.0.0.1:29520: the address of `torchtitan-lite rendezvous`."
        )
    of_machines = given.keys() & {"--rdzv-id", "--rdzv-timeout-s"} or options.num_machines > 1
    if of_machines and not options.endpoint:
        raise ConfigError(
            "--nnodes above 1, --rdzv-id and --rdzv-timeout-s need --rdzv-endpoint: start "
            "`torchtitan-lite rendezvous --bind HOST:PORT` on one machine, and name its address on "
            "all."
        )


def _die_with_nproc() -> None:
    """Kill this rank when its parent dies, so that it does not keep training unsupervised."""
    parent = os.environ.pop(_PARENT, None)
    if parent is not None:
        die_with_parent()
        if os.getppid() != int(parent):
            os.kill(os.getpid(), signal.SIGKILL)


def _train_ranks(arguments: Sequence[str], num_ranks: int) -> int:
    """Start the ranks, forward signals to them, and return the exit status of the first that
    failed, or 0."""
    command = [sys.executable, "-m", "torchtitan_lite", "train", *arguments]
    with _received_signals() as received:
        first = run_ranks(command, num_ranks, {**os.environ, **_of_children()}, received)
    if first is None:
        return 0
    rank, status = first
    if status.is_signal:
        logger.error("Rank %d was %s.", rank, status)
    elif not received:
        logger.error("Rank %d failed with %s; see above.", rank, status)
    return status.code if status.code > 0 else 1


def _train_with_spares(arguments: Sequence[str], options: _Options, config: Config) -> int:
    """Start an agent with the ranks and the spares. Returns the exit status."""
    from torchtitan_lite.fault_tolerance.supervision.launcher.resize_request import RunMesh
    from torchtitan_lite.fault_tolerance.supervision.launcher.restart_policy import RestartPolicy
    from torchtitan_lite.fault_tolerance.supervision.rank_recovery.rank_agent import RankAgent
    from torchtitan_lite.fault_tolerance.supervision.rank_recovery.rank_process import RankProcess

    inbox, check_resize = _resizing(arguments, options, config)
    environment = _of_agent(options)
    with _received_signals() as received:
        agent = RankAgent(
            lambda: RankProcess(arguments, environment),
            RunMesh(options.num_ranks, options.resized),
            options.num_spares,
            # Constant, because an attempt takes seconds anyway, and equal failures end the run.
            policy=RestartPolicy(_MAX_RESTARTS, first_delay_s=0.1, max_delay_s=0.1),
            requests=received,
            inbox=inbox,
            check_resize=check_resize,
        )
        agent.run()
    return agent.exit_status


def _resizing(
    arguments: Sequence[str], options: _Options, config: Config
) -> "tuple[RequestInbox, Callable[[ResizeRequest], None]]":
    """Return where the agent receives requests to resize the run, and their check."""
    from torchtitan_lite.fault_tolerance.supervision.launcher.resize_request import (
        RequestInbox,
        ResizeRequest,
    )

    def check(request: ResizeRequest) -> None:
        check_resize_arguments(request.mesh.arguments)
        world_size = request.mesh.num_ranks * options.num_machines
        resized, _ = _checked([*arguments, *request.mesh.arguments], world_size)
        check_live_resize(config, resized, is_joint=request.is_joint)

    folder = output_folder(config.job.dump_folder, config.fault_tolerance.replica)
    return RequestInbox(folder, is_shared=bool(options.endpoint)), check


def _train_on_machines(arguments: Sequence[str], options: _Options, config: Config) -> int:
    """Train as one of several machines, or wait as a spare one. Returns the exit status. Raises
    UserError."""
    from torchtitan_lite.cli.rendezvous import rendezvous_secret

    secret = rendezvous_secret()
    from torchtitan_lite.config import config_fingerprint
    from torchtitan_lite.fault_tolerance.supervision.rank_recovery.machine_agent import MachineAgent
    from torchtitan_lite.fault_tolerance.supervision.rank_recovery.rank_process import RankProcess
    from torchtitan_lite.fault_tolerance.supervision.rank_recovery.resize_inbox import ResizeInbox
    from torchtitan_lite.fault_tolerance.supervision.rendezvous.link import RendezvousLink

    address = _own_address(options)
    link = RendezvousLink(
        options.endpoint,
        secret,
        address=address,
        name=f"{address} (process {os.getpid()})",
        run_id=options.run_id,
        num_machines=options.num_machines,
        num_ranks=options.num_ranks,
        fingerprint=config_fingerprint(config, options.num_ranks * options.num_machines),
    )
    inbox = ResizeInbox(
        *_resizing(arguments, options, config), check_arguments=check_resize_arguments
    )
    environment = _of_agent(options)
    with _received_signals() as received:
        agent = MachineAgent(
            lambda: RankProcess(arguments, environment),
            options.num_ranks,
            options.num_spares,
            link=link,
            join_timeout_s=options.join_timeout_s,
            requests=received,
            inbox=inbox,
        )
        inbox.start()
        link.start()
        agent.run()
    return agent.exit_status


def _own_address(options: _Options) -> str:
    """Return the address at which the other machines reach this one. Raises ConfigError."""
    host, _, port = options.endpoint.rpartition(":")
    host = host.strip("[]")
    try:
        address = address_for_others(host, int(port))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--rdzv-endpoint {options.endpoint} cannot be reached from this machine: {error}"
        ) from None
    is_local = ip_address(address).is_loopback and not names_loopback(host)
    if is_local and options.num_machines > 1:
        raise ConfigError(
            f"This machine reaches --rdzv-endpoint {options.endpoint} by {address}, which other "
            "machines cannot reach: name an address of the network that all machines share."
        )
    return address


def _of_agent(options: _Options) -> dict[str, str]:
    """Return the environment variables of an agent's processes."""
    return {
        **_of_children(),
        _PARENT: str(os.getpid()),
        TRAIN_OPTIONS: shlex.join(options.kept),
    }


def _of_children() -> dict[str, str]:
    """Return the environment variables of all processes that this one starts."""
    # They share the cores.
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return {**threads, **supervisor_environment()}


@contextmanager
def _received_signals() -> Iterator[list[int]]:
    """Collect the signals that arrive until the end of the block. SIGHUP stays ignored under
    nohup; the others are requests even if a shell has started this process in the background and
    it therefore ignores SIGINT."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in _FORWARDED}
    for number, handler in before.items():
        if number != signal.SIGHUP or handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
