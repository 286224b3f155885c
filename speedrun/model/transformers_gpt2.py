"""GPT-2 in the format of transformers, in both directions: names, orientation of matrices, `config.json`.

Its `Conv1D` holds a matrix as [inputs, outputs], ours is [outputs, inputs]; its `c_attn` concatenates query, key and
value. Both models compute the same function: pre-LayerNorm, GELU by tanh, one table for input and output.
Source: transformers, `models/gpt2/modeling_gpt2.py`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from speedrun import recipes
from speedrun.base import mesh as meshes
from speedrun.base import track as tracks
from speedrun.base.errors import DataError, UsageError
from speedrun.base.track import Track
from speedrun.data.shards import data_folder
from speedrun.data.tokenizer import END_OF_TEXT
from speedrun.model.exported import card, named_arrays, placed, save_folder, tokenizer_file
from speedrun.model.weights import WEIGHTS, Tensors, Trained, read_json, spec_of
from speedrun.recipes import gpt2
from speedrun.science.params import ParamSpec, Table
from speedrun.train.program import Program

CONFIG = "config.json"
#: Tracks whose vocabulary a model may have, in the order of preference.
_TRACKS = ("main-8xh100", "docs-cpu", "smoke-cpu")
_WHOLE = {
    "embed": "wte.weight",
    "positions": "wpe.weight",
    "final_norm.gain": "ln_f.weight",
    "final_norm.bias": "ln_f.bias",
}
_PARTS = {
    "attn_norm": "ln_1",
    "qkv": "attn.c_attn",
    "attn_out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp_up": "mlp.c_fc",
    "mlp_down": "mlp.c_proj",
}
#: Masks in old files, and the head, which transformers replaces by the table of tokens, too.
_IGNORED = re.compile(r"h\.\d+\.attn\.(masked_)?bias|lm_head\.weight")
_READ = ("F32", "F16", "BF16")
_Size = Annotated[int, Meta(ge=1, le=2**24)]


class Config(msgspec.Struct, frozen=True):
    """Fields of `config.json` that we use, with the defaults of transformers."""

    vocab_size: _Size = 50257
    n_positions: _Size = 1024
    n_embd: _Size = 768
    n_layer: _Size = 12
    n_head: _Size = 12
    n_inner: _Size | None = None
    bos_token_id: int | None = 50256


#: Other fields, and the values that describe our model, the default of transformers first.
_COMPUTED: dict[str, tuple[object, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (gpt2.EPS,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


def name_of(ours: str) -> str:
    """Return the name of a parameter in transformers."""
    if ours in _WHOLE:
        return _WHOLE[ours]
    _, layer, part, kind = ours.split(".")
    return f"h.{layer}.{_PARTS[part]}.{'bias' if kind == 'bias' else 'weight'}"


def shape_of(ours: str, spec: ParamSpec) -> tuple[int, ...]:
    """Return the shape of a parameter in transformers."""
    if ours in _WHOLE:
        return spec.shape
    *outputs, inputs = spec.shape
    return (inputs, int(np.prod(outputs))) if ours.endswith(".weight") else (spec.size,)


def outward(ours: str, spec: ParamSpec, x: np.ndarray) -> np.ndarray:
    """Return a parameter as transformers holds it."""
    shape = shape_of(ours, spec)
    return np.ascontiguousarray(x.reshape(shape[::-1]).T) if ours.endswith(".weight") else x.reshape(shape)


def inward(ours: str, spec: ParamSpec, x: np.ndarray) -> np.ndarray:
    """Return a parameter as our model holds it, in float32; the inverse of `outward`."""
    return (x.T if ours.endswith(".weight") else x).reshape(spec.shape).astype(np.float32)


# --- in


def _read_config(folder: Path) -> Config:
    """Read `config.json`; raise DataError if it is damaged, UsageError if it describes another architecture."""
    path = folder / CONFIG
    config, given = read_json(path, Config), read_json(path, dict[str, Any])
    for name, known in _COMPUTED.items():
        if (got := given.get(name, known[0])) not in known:
            raise UsageError(f"{path}: {name} is {got!r}; ours has {known[0]!r}; load it with transformers")
    if config.n_embd % config.n_head:
        found = f"{path}: width {config.n_embd}, {config.n_head} heads"
        raise DataError(f"{found}; need a multiple; copy it again")
    return config


def load(folder: Path, *, data: Path | None, origin: Mapping[str, str]) -> Trained:
    """Load a GPT-2 as the recipe `gpt2` at its sizes, on a track with its vocabulary; see `weight_sources.load`."""
    config, tensors = _read_config(folder), Tensors(folder)
    if config.n_layer > len(tensors.forms):
        raise DataError(f"{folder / CONFIG}: {config.n_layer:,} layers; the weights have fewer; get it again")
    track = _track(folder, config)
    sizes = {
        "config.vocab_size": config.vocab_size,
        "config.max_positions": config.n_positions,
        "config.num_layers": config.n_layer,
        "config.model_dim": config.n_embd,
        "config.num_heads": config.n_head,
        "config.head_dim": config.n_embd // config.n_head,
        "config.mlp_dim": config.n_inner or 4 * config.n_embd,
        "eval_seq_len": config.n_positions,
        "stages.0.seq_len": config.n_positions,
    }
    meshes.prepare("any")
    program = Program(recipes.load("gpt2").override(sizes), meshes.make_mesh(1))
    packed = placed(program, _arrays(tensors, program.layout.table))
    shards = data_folder(track, data)
    # Its own tokenizer, if the track has such a file; else GPT-2's, which every machine can get.
    own = folder if track.python_docs is not None else None
    return Trained(program, track, shards, 0, packed, origin=origin, is_ours=False, tokenizer=own)


def arrays(folder: Path, program: Program) -> Iterable[tuple[str, np.ndarray]]:
    """Yield the parameters of a program by our names; raise an error unless the folder has exactly these."""
    _read_config(folder)
    if program.recipe.table is not gpt2.table:
        raise UsageError(f"{folder} is a GPT-2; got recipe {program.recipe.name}; choose gpt2")
    return _arrays(Tensors(folder), program.layout.table)


def _arrays(tensors: Tensors, table: Table) -> Iterator[tuple[str, np.ndarray]]:
    prefix = "transformer." if any(name.startswith("transformer.") for name in tensors.forms) else ""
    for name in [name for name in tensors.forms if _IGNORED.fullmatch(name.removeprefix(prefix))]:
        del tensors.forms[name]
    ours = {prefix + name_of(name): name for name in table}
    wanted = {
        there: tuple(spec_of(dtype, shape_of(name, table[name])) for dtype in _READ)
        for there, name in ours.items()
    }
    for there, x in tensors.read(wanted):
        yield ours[there], inward(ours[there], table[ours[there]], x)


def _track(folder: Path, config: Config) -> Track:
    for track in map(tracks.load, _TRACKS):
        if config.vocab_size == track.data.vocab_size and config.bos_token_id == track.data.document_token:
            return track
    found = f"{folder}: {config.vocab_size:,} ids, first token {config.bos_token_id}"
    raise UsageError(f"{found}; need the vocabulary of one of the tracks {', '.join(_TRACKS)}")


# --- out


_LOAD = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
{tokenizer}
```

Token {document_token} opens every document: begin a prompt with it. The harness that trained it reads the folder, too:
`speedrun sample {name}`.

"""


def write(trained: Trained, out: Path) -> list[Path]:
    """Write a folder that transformers loads; return its files.

    Raises:
        UsageError: if the folder is not new or empty, or the model is no GPT-2.
        DataError: if the tokenizer's file is missing.
    """
    from safetensors.numpy import save

    recipe, cfg = trained.program.recipe, trained.program.recipe.config
    is_gpt2 = recipe.forward is gpt2.forward and recipe.table is gpt2.table
    if not is_gpt2 or cfg.num_heads * cfg.head_dim != cfg.model_dim:
        found = f"transformers has no architecture like {recipe.name}'s"
        raise UsageError(f"{found}; choose --to safetensors or --to web")
    named, opens = named_arrays(trained), trained.track.data.document_token
    sizes = cfg.vocab_size, cfg.max_positions, cfg.model_dim, cfg.num_layers, cfg.num_heads, cfg.mlp_dim
    config = {
        "architectures": ["GPT2LMHeadModel"],
        **{name: known[0] for name, known in _COMPUTED.items()},
        **msgspec.to_builtins(Config(*sizes, opens)),
        "eos_token_id": opens,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        "torch_dtype": "float32",
    }
    own = {name: raw for name, raw in tokenizer_file(trained).items() if name == "tokenizer.json"}
    if own:
        ends = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
        own["tokenizer_config.json"] = _json({"tokenizer_class": "PreTrainedTokenizerFast", **ends})
    tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("{out.name if own else "gpt2"}")'
    if trained.track.synthetic is not None:
        tokenizer = "# Its ids are those of synthetic data, and stand for no text."
    load = _LOAD.format(name=out.name, tokenizer=tokenizer, document_token=opens)
    specs = trained.program.layout.table.items()
    there = {name_of(name): outward(name, spec, named[name]) for name, spec in specs}
    files = {
        WEIGHTS: save(there, metadata={"format": "pt"}),  # without it, transformers refuses the file
        CONFIG: _json(config),
        "README.md": card(trained, "transformers", load).encode(),
    }
    return save_folder(trained, out, files | own)


def _json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
