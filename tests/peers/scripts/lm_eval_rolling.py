"""FOLDER MODEL DOCUMENTS MAX_LENGTH OUT: lm-eval's rolling log likelihood of each document."""

import json
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

_, _, model, documents, max_length, out = sys.argv
with open(documents, encoding="utf-8") as file:
    texts = [json.loads(line)["text"] for line in file]
harness = HFLM(
    pretrained=model, max_length=int(max_length), dtype="float32", device="cpu", batch_size=1
)
requests = [
    Instance("loglikelihood_rolling", {}, (text,), number) for number, text in enumerate(texts)
]
with open(out, "w", encoding="utf-8") as file:
    found = [float(value) for value in harness.loglikelihood_rolling(requests, disable_tqdm=True)]
    json.dump(
        {
            "log_likelihoods": found,
            "tokens": sum(len(harness.tok_encode(text)) for text in texts),
            "prefix": harness.prefix_token_id,
        },
        file,
    )
