"""vLLM generates with versions of the weights that a live run publishes.

Arguments: a folder to work in, the paths that Python shall search, the folder of the run, the
number of workers, a JSON file of prompts as token ids, the number of tokens for each, and the path
of the result.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

_, _folder, _paths, _run, _workers, _prompts, _num_tokens, _out = sys.argv
sys.path[:0] = _paths.split(os.pathsep)
os.environ["PYTHONPATH"] = _paths
# `collective_rpc` of a function.
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
# Otherwise each worker needs a NUMA node of its own.
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"

from vllm import LLM, SamplingParams  # noqa: E402

from torchtitan_lite.serving.publish import Subscriber  # noqa: E402
from torchtitan_lite.serving.publish.hugging_face import hugging_face_config  # noqa: E402


def main() -> None:
    """Receive two versions, and generate with each."""
    model = Path(_folder) / "model"
    model.mkdir()
    with Subscriber(_run) as subscriber:
        config = hugging_face_config(subscriber)
    (model / "config.json").write_text(json.dumps(config))
    llm = LLM(
        str(model),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        enforce_eager=True,
        tensor_parallel_size=int(_workers),
        distributed_executor_backend="mp" if int(_workers) > 1 else None,
        weight_transfer_config={"backend": "torchtitan_lite"},
    )
    llm.init_weight_transfer_engine({"init_info": {"source": _run}})
    versions = []
    for _ in range(2):
        llm.start_weight_update()
        llm.update_weights({"update_info": {"timeout_s": 120.0}})
        llm.finish_weight_update()
        llm.reset_prefix_cache()
        held = llm.collective_rpc(_version)
        versions.append({"versions": held, "generated": _generate(llm)})
    Path(_out).write_text(json.dumps(versions))


def _version(worker: Any) -> int:
    return worker.weight_transfer_engine.version


def _generate(llm: LLM) -> list[dict[str, Any]]:
    prompts = json.loads(Path(_prompts).read_text())
    greedy = SamplingParams(
        temperature=0.0, max_tokens=int(_num_tokens), logprobs=1, detokenize=False, ignore_eos=True
    )
    found = []
    for output in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy):
        (sample,) = output.outputs
        tokens = list(sample.token_ids)
        values = [at[token].logprob for at, token in zip(sample.logprobs, tokens, strict=True)]
        found.append({"tokens": tokens, "log_probabilities": values})
    return found


if __name__ == "__main__":
    main()
