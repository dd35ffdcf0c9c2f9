"""A model whose steps take milliseconds; a module for `experimental.custom_import`."""

from torchtitan_lite.models import llama3

FLAVOR = "diagnosis"
llama3.FLAVORS[FLAVOR] = llama3.Llama3Dims(
    dim=64, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=128, vocab_size=512
)
