"""Make a Hugging Face folder, which transformers loads, from a checkpoint of ours.

python -m scripts.convert_to_hf CHECKPOINT OUT_DIR [--dtype bf16] [--max-shard-size 5GB]

CHECKPOINT is a step's folder (".../step-1000"), which says itself of which model it is. Tokenizer
and settings of generation come from where the run had them, or from --assets. A run that was
interrupted goes on when it is started again.
"""

import argparse
import re
import sys
from pathlib import Path

from scripts.conversion_progress import DTYPES, add_options, local_path, run_with_bar
from torchtitan_lite.checkpoint.foreign import refuse_foreign
from torchtitan_lite.checkpoint.hugging_face.room import check_room
from torchtitan_lite.checkpoint.hugging_face.to_hf import ToHuggingFace
from torchtitan_lite.checkpoint.snapshots import StoredSnapshot
from torchtitan_lite.checkpoint.storage.storage import split_storage
from torchtitan_lite.config import recorded_config
from torchtitan_lite.data.tokenizer import special_ids
from torchtitan_lite.errors import DataError, UserError
from torchtitan_lite.inference.weights import Weights, find_tokenizer
from torchtitan_lite.log import configure_logging, logger
from torchtitan_lite.models import model_spec

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def main(argv: list[str]) -> int:
    """Entry of the command. Returns the exit status."""
    configure_logging()
    options = _parser().parse_args(argv)
    try:
        storage, name = split_storage(options.checkpoint)
        refuse_foreign(storage, name)
        source = StoredSnapshot(storage, name)
        config = recorded_config(source.manifest.config, source.where)
        spec = model_spec(config.model)
        weights = Weights(snapshot=source, spec=spec, config=config)
        assets = options.assets or _tokenizer_folder(weights)
        conversion = ToHuggingFace(
            source,
            options.out_dir,
            spec,
            dtype=options.dtype and DTYPES[options.dtype],
            max_shard_bytes=options.max_shard_size,
            assets=assets,
            special_ids=special_ids(assets),
            drop_expert_bias=options.drop_expert_bias,
        )
        check_room(options.out_dir, conversion.num_bytes_left)
        copied = run_with_bar(
            conversion.num_bytes,
            lambda written: conversion.run(num_workers=options.workers, written=written),
        )
    except (UserError, OSError) as error:
        logger.error("%s", error)
        return 1
    if "tokenizer.json" not in copied and "tokenizer.model" not in copied:
        logger.warning(
            "There is no tokenizer in %s. Add its files, or export again with --assets DIR.",
            options.out_dir,
        )
    print(f"{options.out_dir}: {conversion.num_bytes / 1e6:.1f} MB of weights.")
    return 0


def _tokenizer_folder(weights: Weights) -> Path | None:
    """The folder of the tokenizer that the weights were trained with, where it is in reach."""
    given = weights.config.model.hf_assets_path
    if given is not None and Path(given).expanduser().is_dir():
        return Path(given).expanduser()
    try:
        return find_tokenizer(weights, None).folder
    except DataError as error:
        logger.warning("%s", error)
        return None


def _size(text: str) -> int:
    """Bytes, from a number and a unit as transformers writes them ("5GB")."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGT]B)", text.upper())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give one such as 5GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2]])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.convert_to_hf",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", help='a step\'s folder, such as ".../step-1000"')
    parser.add_argument("out_dir", type=local_path, help="a folder that does not exist yet")
    parser.add_argument("--max-shard-size", type=_size, default="5GB", help="(default: 5GB)")
    parser.add_argument("--assets", type=local_path, help="folder with the files of the tokenizer")
    parser.add_argument(
        "--drop-expert-bias",
        action="store_true",
        help="leave out what balances the experts, which transformers does not know",
    )
    add_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
