"""FOLDER FLAVOR TOKENS DCP MODE OUT: logits of torchtitan's Llama 3 for some tokens.

MODE "load": of the weights in the DCP checkpoint. "save": of its own initial weights, which are
written there.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torchtitan.models.llama3 import Transformer, llama3_args

_, folder, flavor, tokens, path, mode, out = sys.argv
torch.manual_seed(3)
model = Transformer(llama3_args[flavor])
with torch.no_grad():
    model.init_weights()
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
