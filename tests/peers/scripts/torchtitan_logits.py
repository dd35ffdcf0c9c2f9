"""FOLDER FAMILY FLAVOR TOKENS DCP MODE OUT: logits of a model of torchtitan for some tokens.

MODE "load": of the weights in the DCP checkpoint. "save": of its own initial weights, which are
written there.
"""

import json
import sys
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

_, folder, family, flavor, tokens, path, mode, out = sys.argv
torch.manual_seed(3)
spec = import_module(f"torchtitan.models.{family}").get_train_spec()
arguments = spec.model_args[flavor]
if family != "llama3":
    # Grouped products of matrices need a GPU, and so do histograms of integers.
    arguments.moe_args.use_grouped_mm = False
    arguments.moe_impl = "standard"
    # As a run on short sequences sets it: without YaRN.
    arguments.max_seq_len = 4096
    histogram = torch.histc
    torch.histc = lambda values, **bins: histogram(values.float(), **bins).to(values.dtype)
model = spec.model_cls(arguments)
if family == "deepseek_v3":
    # As in transformers, and so here; torchtitan has others, which change logits by up to 1e-4.
    model.norm.eps = arguments.norm_eps
    for layer in model.layers.values():
        layer.attention.kv_norm.eps = 1e-6
with torch.no_grad():
    model.init_weights(buffer_device=torch.device("cpu"))
state = model.state_dict()
if mode == "load":
    dcp.load(state, checkpoint_id=path, no_dist=True)
    model.load_state_dict(state)
else:
    dcp.save(state, checkpoint_id=path, no_dist=True)
with torch.no_grad():
    logits = model(torch.tensor(json.loads(Path(tokens).read_text())))
torch.save(logits, Path(folder) / f"{mode}.pt")
Path(out).write_text(json.dumps(list(logits.shape)))
