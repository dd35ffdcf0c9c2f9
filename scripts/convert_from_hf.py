"""Make a checkpoint of ours from a Hugging Face folder (safetensors), without holding the model.

python -m scripts.convert_from_hf HF_DIR OUT_DIR [--dtype bf16] [--workers N]

The weights go to OUT_DIR/step-0, which checkpoint.initial_load_path then names, and tokenizer and
settings to OUT_DIR/assets. A run that was interrupted goes on when it is started again.
"""

import argparse
import sys

from scripts.conversion_progress import DTYPES, add_options, local_path, run_with_bar
from torchtitan_lite.checkpoint.hugging_face.folder import is_hugging_face, read_config
from torchtitan_lite.checkpoint.hugging_face.from_hf import BLOCK_BYTES, FromHuggingFace
from torchtitan_lite.checkpoint.hugging_face.room import check_room
from torchtitan_lite.checkpoint.hugging_face.snapshot import HuggingFaceSnapshot
from torchtitan_lite.checkpoint.storage.storage import open_storage, split_storage
from torchtitan_lite.config import Config
from torchtitan_lite.errors import CheckpointError, UserError
from torchtitan_lite.log import configure_logging, logger
from torchtitan_lite.models import hugging_face_model, model_spec


def main(argv: list[str]) -> int:
    """Entry of the command. Returns the exit status."""
    configure_logging()
    options = _parser().parse_args(argv)
    try:
        conversion = _prepare(options)
        if conversion.assets is not None:
            check_room(conversion.assets, conversion.num_bytes_left)
        run_with_bar(
            conversion.num_bytes,
            lambda written: conversion.run(num_workers=options.workers, written=written),
        )
    except (UserError, OSError) as error:
        logger.error("%s", error)
        return 1
    print(f"{conversion.where}: {len(conversion.source.tensors)} tensors, weights only.")
    return 0


def _prepare(options: argparse.Namespace) -> FromHuggingFace:
    folder = options.hf_dir
    storage, name = split_storage(str(folder))
    if not is_hugging_face(storage, name):
        raise CheckpointError(
            f"{folder} is no Hugging Face folder: it holds neither model.safetensors nor "
            "model.safetensors.index.json."
        )
    # An object store has no place for what is read from a folder.
    assets = None if "://" in options.out_dir else local_path(options.out_dir) / "assets"
    model = hugging_face_model(read_config(storage, name), str(assets or folder))
    return FromHuggingFace(
        source=HuggingFaceSnapshot(storage, name, model_spec(model), block_bytes=BLOCK_BYTES),
        storage=open_storage(options.out_dir),
        dtype=options.dtype and DTYPES[options.dtype],
        run_config=Config(model=model).model_dump(),
        assets=assets,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.convert_from_hf",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("hf_dir", type=local_path, help="the folder that holds config.json")
    parser.add_argument("out_dir", help="folder or URL in which step-0 is written")
    add_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
