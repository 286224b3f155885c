"""A model of speedrun in transformers, for any architecture: JAX computes the logits, and there are no gradients.

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

Needs torch, transformers and jax. Each `logits-LENGTH.jax` is a program from all weights and a row of LENGTH tokens to
logits [LENGTH, vocabulary]. Shorter rows are padded, since no position sees a later one.
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
        for name, shape in config.shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.empty(shape), requires_grad=False))
        self._programs = {}
        self.post_init()

    def _logits(self, row_T):
        """Return the logits of one row, f32 [T, V]."""
        length = next((length for length in self.config.lengths if length >= len(row_T)), None)
        if length is None:
            raise ValueError(f"{len(row_T)} tokens; the model takes at most {max(self.config.lengths)}")
        if length not in self._programs:
            path = cached_file(self.config.name_or_path, f"logits-{length}.jax")
            self._programs[length] = jax.jit(jax.export.deserialize(bytearray(Path(path).read_bytes())).call)
        if "weights" not in self._programs:
            self._programs["weights"] = [jax.numpy.asarray(x.float().cpu()) for x in self.parameters()]
        padded_T = np.zeros(length, np.int32)
        padded_T[: len(row_T)] = row_T
        logits_TV = self._programs[length](self._programs["weights"], padded_T)
        return torch.from_numpy(np.array(logits_TV[: len(row_T)]))

    def forward(self, input_ids, attention_mask=None, labels=None, **_):
        """Return logits [B, T, V], and the mean loss of the labels; padding may only stand at the end."""
        if attention_mask is not None and not bool(attention_mask[:, 0].all()):
            raise ValueError("padding at the start; set tokenizer.padding_side = 'right'")
        logits_BTV = torch.stack([self._logits(row_T) for row_T in input_ids.cpu().numpy()]).to(
            input_ids.device
        )
        if labels is None:
            return CausalLMOutput(logits=logits_BTV)
        scored = logits_BTV[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return CausalLMOutput(loss=torch.nn.functional.cross_entropy(*scored), logits=logits_BTV)
