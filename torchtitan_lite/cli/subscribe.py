"""`torchtitan-lite subscribe`."""

import argparse
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from torchtitan_lite.core.errors import PublishError, UserError
from torchtitan_lite.core.log import configure_logging, log_error_on_rank_0
from torchtitan_lite.distributed.rpc.authentication import TOKEN
from torchtitan_lite.serving.publish import Subscriber, Target, hugging_face_targets
from torchtitan_lite.serving.publish.hugging_face import empty_state_dict, hugging_face_config

_MIB = 2**20


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Receive versions according to `options`. Returns the exit status."""
    if arguments:
        options.parser.error(f"unrecognized arguments: {' '.join(arguments)}")
    configure_logging()
    try:
        secret = os.environ.get(TOKEN, "")
        with Subscriber(options.source, secret=secret, timeout_s=options.timeout) as subscriber:
            _receive(options, subscriber)
    except (UserError, OSError) as error:
        log_error_on_rank_0(error)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _receive(options: argparse.Namespace, subscriber: Subscriber) -> None:
    tensors: Mapping[str, torch.Tensor]
    if options.out is None:
        tensors = {
            name: torch.empty(spec.shape, dtype=spec.dtype)
            for name, spec in subscriber.tensors.items()
        }
        targets = [Target(name, tensor) for name, tensor in tensors.items()]
    else:
        tensors = empty_state_dict(subscriber)
        targets = hugging_face_targets(subscriber, tensors)
    subscription = subscriber.subscribe(targets)
    num_versions = 0
    written: list[int] = []
    while options.versions is None or num_versions < options.versions:
        update = subscription.update(timeout_s=options.timeout)
        if update is None:
            if num_versions:
                print(f"No further version within {options.timeout} s.", flush=True)
                return
            reason = subscription.problem or "Is its run training?"
            raise PublishError(
                f"{subscriber.where} published no version within {options.timeout} s. {reason} "
                "--timeout SECONDS waits longer."
            )
        num_versions += 1
        whole = update.num_bytes + update.num_bytes_unchanged
        # With deltas, fewer bytes are received than have changed.
        has_deltas = update.num_bytes_received < update.num_bytes
        received = f"{update.num_bytes_received / _MIB:.1f} MiB " if has_deltas else ""
        print(
            f"version {update.version}: {update.num_bytes / _MIB:.1f} of {whole / _MIB:.1f} MiB "
            f"changed, {received}received in {update.seconds:.3f} s",
            flush=True,
        )
        if options.out is not None:
            _write(options.out, update.version, tensors, subscriber, written, options.keep)


def _write(
    out: Path,
    version: int,
    tensors: Mapping[str, torch.Tensor],
    subscriber: Subscriber,
    written: list[int],
    keep: int,
) -> None:
    """Write a version as a folder that appears complete, and remove all but `keep` of those
    `written` by this process."""
    partial = out / f".version-{version}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(dict(tensors), partial / "model.safetensors", {"format": "pt"})
    (partial / "config.json").write_text(json.dumps(hugging_face_config(subscriber), indent=2))
    target = out / f"version-{version}"
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    written.append(version)
    for old in written[:-keep]:
        shutil.rmtree(out / f"version-{old}", ignore_errors=True)
    del written[:-keep]
