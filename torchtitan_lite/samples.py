"""Text from a copy of the model that is cut for it, made once and filled before each use.

The training model would gather its shards anew for each token. Layer: above generate and
move_state.
"""

import torch
from torch import nn

from torchtitan_lite.data import Tokenizer
from torchtitan_lite.generate import generate, prompt_ids
from torchtitan_lite.loss import cross_entropy
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.move_state import fill
from torchtitan_lite.nn.initialize import give_memory
from torchtitan_lite.parallel import build_schedule, serving
from torchtitan_lite.rng import fold
from torchtitan_lite.schema.parallelism import ParallelismConfig
from torchtitan_lite.schema.validation import ValidationConfig
from torchtitan_lite.spec import ModelSpec
from torchtitan_lite.train_state import TrainState, model_tensors


class Sampler:
    """The copy, and what is asked of it. It computes in the dtype of the weights."""

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        mesh: Mesh,
        config: ValidationConfig,
        tokenizer: Tokenizer,
        *,
        max_seq_len: int,
        seed: int,
    ) -> None:
        """`model` is the whole model on the meta device, which becomes the copy; `mesh` is that of
        training. Every rank must come to it."""
        self._mesh = mesh
        self._serving_mesh = mesh.seen_as(serving.serving_degrees(spec, mesh.world_size))
        serving.apply(model, spec, self._serving_mesh)
        give_memory(model, mesh.device.torch_device)
        self._model = model.requires_grad_(False).eval()
        self._schedule = build_schedule(
            [model],
            spec,
            cross_entropy(),
            self._serving_mesh,
            ParallelismConfig(),
            hidden_dtype=next(model.parameters()).dtype,
        )
        self._config = config
        self._tokenizer = tokenizer
        self._max_seq_len = max_seq_len
        self._seed = seed

    def texts(self, state: TrainState) -> list[str]:
        """What the model of `state` makes of the prompt, `config.samples` times. Every rank must
        call it between two steps."""
        return [self._tokenizer.decode(ids) for ids in self.ids(state)]

    @torch.no_grad()
    def ids(self, state: TrainState) -> list[list[int]]:
        """`texts` as ids."""
        trained = {
            name: tensor for name, tensor in state.tensors().items() if name.startswith("model.")
        }
        fill(model_tensors(self._model), self._serving_mesh, trained, self._mesh)
        return [
            generate(
                self._model,
                self._schedule,
                prompt_ids(self._tokenizer, self._config.sample_prompt),
                self._serving_mesh,
                num_tokens=self._config.sample_tokens,
                max_seq_len=self._max_seq_len,
                temperature=self._config.sample_temperature,
                seed=fold(self._seed, "sample", number),
                stop_id=self._tokenizer.eos_id,
            )
            for number in range(self._config.samples)
        ]
