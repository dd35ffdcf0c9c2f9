"""A Hugging Face folder with random weights, as large as asked for, in bfloat16.

python -m benchmarks.convert_model --folder FOLDER --mb N --shards N
"""

import argparse
import json
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file

from torchtitan_lite.checkpoint.conversion import expected_shapes
from torchtitan_lite.checkpoint.hugging_face.snapshot import expand_key, match_key
from torchtitan_lite.models.llama3 import Llama3Dims, spec_of
from torchtitan_lite.spec import ModelSpec

_BYTES = torch.bfloat16.itemsize


def spec_of_size(num_mb: int) -> ModelSpec:
    """A Llama of about so many megabytes: the embeddings of a tenth of that, and as many blocks as
    it takes."""
    dim = 2048 if num_mb >= 500 else 512
    vocab_size = num_mb * 10**5 // (dim * _BYTES)
    dims = Llama3Dims(
        dim=dim,
        num_layers=1,
        num_heads=dim // 64,
        num_kv_heads=dim // 256,
        hidden_dim=dim * 11 // 4,
        vocab_size=vocab_size,
    )
    block = spec_of(dims, "block").cost(1).num_params - 2 * vocab_size * dim
    num_layers = max(1, round((num_mb * 10**6 / _BYTES - 2 * vocab_size * dim) / block))
    return spec_of(Llama3Dims(**{**vars(dims), "num_layers": num_layers}), f"{num_mb} MB")


def write(folder: Path, spec: ModelSpec, num_shards: int) -> None:
    """Write the folder."""
    assert spec.hugging_face is not None
    folder.mkdir(parents=True)
    parameters, _ = expected_shapes(spec)
    total = sum(map(prod, parameters.values())) * _BYTES
    torch.manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, shape in parameters.items():
        rule, numbers = match_key(spec.hugging_face.keys, name)
        (key,) = expand_key(rule.forms[0], numbers, shape)
        if size >= total * len(shards) / num_shards:
            shards.append({})
        shards[-1][key] = torch.randn(shape, dtype=torch.bfloat16)
        size += prod(shape) * _BYTES
    places = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {**spec.hugging_face.config, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the folder that the command line asks for."""
    parser = argparse.ArgumentParser(description="Write a random model of transformers.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mb", type=int, required=True)
    parser.add_argument("--shards", type=int, required=True)
    given = parser.parse_args(arguments)
    write(given.folder, spec_of_size(given.mb), given.shards)


if __name__ == "__main__":
    main()
