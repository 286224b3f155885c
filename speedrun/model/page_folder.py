"""The folder of a model in the browser: the page, jax-js, and in models/NAME programs, weights and the tokenizer.

Any static host can serve it.
"""

import base64
import json
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import safetensors.numpy

from speedrun.base.atomic_files import make_record
from speedrun.base.bpe_pairs import replayed
from speedrun.base.errors import DataError
from speedrun.base.track import Track
from speedrun.model.decode import DecodingKernels, lengths
from speedrun.model.page_program import Constants, program
from speedrun.model.weights import Trained
from speedrun.science.inputs import Inputs
from speedrun.science.params import Params
from speedrun.science.recipe import Recipe

LIST = "models.json"
FORMAT = "speedrun.web/1"
#: Rows of the longer program for logits.
ROWS = 64
_HERE = Path(__file__).parent
JAX_JS = "jax-js-jax-0.1.25.tgz"  #: as npm published it


def write(trained: Trained, out: Path) -> list[Path]:
    """Write a trained model with its page into a new or empty folder; return the files.

    Raises:
        UsageError: if the page lacks an operation of the model, or the folder is not empty.
        DataError: if the page cannot use the tokenizer.
    """
    recipe, track = trained.program.recipe.override({"compute_dtype": "float32"}), trained.track
    trained = replace(trained, program=replace(trained.program, recipe=recipe))
    params = {name: jnp.asarray(x, jnp.float32) for name, x in trained.params.items()}
    name, words = f"{recipe.name}-{trained.step}", trained.words
    facts = {"name": name, "track": track.id, "step": trained.step, "has_text": words.encoder is not None}
    files = of_model(recipe, params, trained.inputs, track, facts)
    if words.encoder:
        described = described_tokenizer(words.encoder.name, words.encoder.raw, words.tokens)
        files["tokenizer.json"] = msgspec.json.encode(described)
    return make_record(out, site({name: files}))


def site(models: Mapping[str, Mapping[str, bytes]]) -> dict[str, bytes]:
    """Return the files of a page with models, by path; `models` has theirs by name."""
    files = {file.name: file.read_bytes() for file in (_HERE / "page").iterdir() if file.is_file()}
    files |= {LIST: msgspec.json.encode(list(models))}
    files |= {f"jax-js/{name}": raw for name, raw in jax_js().items()}
    return files | {f"models/{name}/{file}": raw for name, of in models.items() for file, raw in of.items()}


def of_model(
    recipe: Recipe, params: Params, inputs: Inputs, track: Track, facts: dict[str, Any]
) -> dict[str, bytes]:
    """Return `model.json` and `weights.safetensors` of parameters in float32."""
    constants, config, kernels = Constants(params), recipe.config, DecodingKernels()
    vocab_size = track.data.vocab_size

    def states(params: Params, tokens_BT: jax.Array) -> jax.Array:
        read = recipe.read(params, tokens_BT)
        return recipe.forward(read, tokens_BT, inputs, config, kernels).reshape(tokens_BT.size, -1)

    def logits(params: Params, x_ND: jax.Array) -> jax.Array:
        return recipe.logits(params, x_ND, inputs, config)[:, :vocab_size]

    tokens = [jax.ShapeDtypeStruct((1, length), jnp.int32) for length in lengths(recipe.eval_seq_len)]
    (_, width) = jax.eval_shape(states, params, tokens[0]).shape
    rows = [jax.ShapeDtypeStruct((n, width), jnp.float32) for n in (1, ROWS)]
    described = {
        "format": FORMAT,
        **facts,
        "vocab_size": vocab_size,
        "document_token": track.data.document_token,
        "num_positions": recipe.eval_seq_len,
        "states": [program(states, params, [one], constants) for one in tokens],
        "logits": [program(logits, params, [one], constants) for one in rows],
    }
    return {
        "model.json": msgspec.json.encode(described),
        "weights.safetensors": safetensors.numpy.save(constants.arrays),
    }


def described_tokenizer(name: str, raw: bytes, tokens: dict[int, bytes]) -> dict[str, Any]:
    """Return the bytes of each id in base64, and the merges as [left, right, merged] in order.

    `name` is gpt2, or that of the file with these `raw` bytes; `tokens` has no special ids.

    Raises:
        DataError: if it is not byte-level BPE that splits words as GPT-2 does.
    """
    pairs = _merges_of_ranks(tokens) if name == "gpt2" else _merges_of_file(name, raw)
    spelled = [base64.b64encode(tokens.get(index, b"")).decode() for index in range(max(tokens) + 1)]
    return {"tokens": spelled, "merges": pairs}


def _merges_of_file(name: str, raw: bytes) -> list[list[int]]:
    found = json.loads(raw)
    model, splitter = found["model"], found.get("pre_tokenizer") or {}
    plain = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    wanted = {key: splitter.get(key) for key in plain}
    extras = [key for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout") if model.get(key)]
    if wanted != plain or found.get("normalizer") or extras or model.get("type") != "BPE":
        raise DataError(f"{name}: need byte-level BPE that splits words as GPT-2 does")
    ids = model["vocab"]
    split = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    return [[ids[left], ids[right], ids[left + right]] for left, right in split]


def _merges_of_ranks(tokens: dict[int, bytes]) -> list[list[int]]:
    """Return the last merge of each token, in the order of ranks."""
    ids = {token: index for index, token in tokens.items()}
    last = {index: replayed(token, ids)[2] for index, token in sorted(tokens.items())}
    # Not of a token that no merge makes.
    return [[*map(ids.__getitem__, pair), i] for i, pair in last.items() if b"".join(pair) == tokens[i]]


def jax_js() -> dict[str, bytes]:
    """Return the modules of jax-js, and its licence."""
    files = {}
    with tarfile.open(name=_HERE / JAX_JS) as archive:
        for member in archive:
            folder, _, name = member.name.rpartition("/")
            is_module = folder == "package/dist" and name.endswith(".js")
            if (is_module or name == "LICENSE") and (file := archive.extractfile(member)) is not None:
                files[name] = file.read()
    return files
