"""A model of speedrun in transformers, for any architecture: JAX computes the logits, and there are no gradients.

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

Needs torch, transformers and jax. Each `logits-LENGTH.jax` is a program from all weights and a row of LENGTH tokens to
logits [LENGTH, vocabulary]. Shorter rows are padded, since no position sees a later one. Programs get the
weights as they are at the first call. `save_pretrained` leaves the programs out: copy the folder.
"""
# pyright: basic, reportMissingImports=false

from pathlib import Path

import jax
import numpy as np
import torch
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import cached_file


class SpeedrunConfig(PretrainedConfig):
    """`shapes` has those of all weights by name; `lengths` those of the programs."""

    model_type = "speedrun"


class SpeedrunForCausalLM(PreTrainedModel, GenerationMixin):
    """Weights that transformers loads, and programs that are read when a row first needs them."""

    config_class = SpeedrunConfig

    def __init__(self, config):
        super().__init__(config)
        for name, shape in sorted(config.shapes.items()):
            self.register_parameter(name, torch.nn.Parameter(torch.empty(shape), requires_grad=False))
        folder, at = config.name_or_path, getattr(config, "_commit_hash", None)
        paths = {n: cached_file(folder, f"logits-{n}.jax", revision=at) for n in config.lengths}
        self._paths, self._programs = {n: Path(path).resolve() for n, path in paths.items()}, {}
        self.post_init()

    def _logits(self, row_T):
        """Return the logits of one row, f32 [T, V]."""
        length = next((length for length in self.config.lengths if length >= len(row_T)), None)
        if length is None:
            raise ValueError(f"{len(row_T)} tokens; the model takes at most {max(self.config.lengths)}")
        if length not in self._programs:
            program = jax.export.deserialize(bytearray(self._paths[length].read_bytes()))
            self._programs[length] = jax.jit(program.call)
        if "weights" not in self._programs:
            weights = (x.detach().float().cpu() for x in self.parameters())
            self._programs["weights"] = list(map(jax.numpy.asarray, weights))
        padded_T = np.zeros(length, np.int32)
        padded_T[: len(row_T)] = row_T
        logits_TV = self._programs[length](self._programs["weights"], padded_T)
        return torch.from_numpy(np.array(logits_TV[: len(row_T)]))

    def forward(self, input_ids, attention_mask=None, **_):
        """Return logits [B, T, V]; padding may only stand at the end, and no new token after it."""
        if attention_mask is not None and bool((attention_mask.diff(dim=1) > 0).any()):
            raise ValueError("tokens after padding; pad at the end, and continue texts one by one")
        logits_BTV = torch.stack([self._logits(row_T) for row_T in input_ids.cpu().numpy()])
        return CausalLMOutput(logits=logits_BTV.to(input_ids.device))
