"""A folder that transformers loads: a GPT-2 as such, any other model with a module of its own."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from speedrun.base.mesh import setting
from speedrun.data.tokenizer import END_OF_TEXT
from speedrun.model import transformers_gpt2
from speedrun.model.decode import lengths
from speedrun.model.exported import card, named_arrays, save_folder, tokenizer_file
from speedrun.model.incremental import DecodingKernels
from speedrun.model.weights import WEIGHTS, Trained

_MODULE = Path(__file__).parent / "transformers_module" / "modeling_speedrun.py"
_LOAD = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
{tokenizer}
```

Token {document_token} opens every document: begin a prompt with it. {reads}

"""


def write(trained: Trained, out: Path) -> list[Path]:
    """Write the folder; return its files.

    Raises:
        UsageError: if the folder is not new or empty.
        DataError: if the tokenizer's file is missing.
    """
    from safetensors.numpy import save

    if is_gpt2 := transformers_gpt2.fits(trained):
        (weights, config), files = transformers_gpt2.parts(trained), dict[str, bytes]()
        reads = f"The harness that trained it reads the folder, too: `speedrun sample {out.name}`."
    else:
        weights, config, files = _parts_of_any(trained)
        reads = (
            f"JAX computes its logits (`pip install jax=={jax.__version__}`), without cache and gradients."
        )
    own = {name: raw for name, raw in tokenizer_file(trained).items() if name == "tokenizer.json"}
    if own:
        own["tokenizer_config.json"] = _json(
            {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
        )
    tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("{out.name if own else "gpt2"}")'
    if trained.track.synthetic is not None:
        tokenizer = "# Its ids are those of synthetic data, and stand for no text."
    load = _LOAD.format(
        name=out.name,
        trust="" if is_gpt2 else ", trust_remote_code=True",
        tokenizer=tokenizer,
        document_token=trained.track.data.document_token,
        reads=reads,
    )
    files |= {
        WEIGHTS: save(weights, metadata={"format": "pt"}),  # without it, transformers refuses the file
        transformers_gpt2.CONFIG: _json(config),
        "README.md": card(trained, "transformers", load).encode(),
    }
    return save_folder(trained, out, files | own)


def _parts_of_any(trained: Trained) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, bytes]]:
    """Return weights, `config.json` and other files; programs compute in float32, on CPUs or NVIDIA's GPUs."""
    recipe, inputs = trained.program.recipe.override({"compute_dtype": "float32"}), trained.inputs
    config, vocab_size, kernels = recipe.config, trained.track.data.vocab_size, DecodingKernels()
    named, document_token = dict(sorted(named_arrays(trained).items())), trained.track.data.document_token

    def logits(weights: list[jax.Array], tokens_T: jax.Array) -> jax.Array:
        params = dict(zip(named, weights, strict=True))
        read = recipe.read(params, tokens_T[None])
        x_TD = recipe.forward(read, tokens_T[None], inputs, config, kernels)[0]
        return recipe.logits(params, x_TD, inputs, config)[:, :vocab_size]

    forms = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in named.values()]
    export = jax.export.export(jax.jit(logits), platforms=("cpu", "cuda"))
    files = {_MODULE.name: _MODULE.read_bytes()}
    with setting("jax_traceback_in_locations_limit", 0):  # locations name folders of this machine
        for length in lengths(recipe.eval_seq_len):
            program = export(forms, jax.ShapeDtypeStruct((length,), jnp.int32))
            files[f"logits-{length}.jax"] = bytes(program.serialize())
    # PyTorch has no dots in the names of parameters.
    there = {name.replace("-", "--").replace(".", "-"): x for name, x in named.items()}
    about = {
        "model_type": "speedrun",
        "architectures": ["SpeedrunForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{_MODULE.stem}.SpeedrunConfig",
            "AutoModelForCausalLM": f"{_MODULE.stem}.SpeedrunForCausalLM",
        },
        "vocab_size": vocab_size,
        "shapes": {name: x.shape for name, x in there.items()},
        "lengths": lengths(recipe.eval_seq_len),
        "use_cache": False,
        "torch_dtype": "float32",  # else that of the first weight
        **dict.fromkeys(("bos_token_id", "eos_token_id"), document_token),
    }
    return there, about, files


def _json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
