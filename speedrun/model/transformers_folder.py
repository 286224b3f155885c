"""A folder that transformers loads: a GPT-2 as such, any other model with a module of its own."""

from pathlib import Path
from typing import Any

import msgspec

from speedrun.data.tokenizer import END_OF_TEXT
from speedrun.model import transformers_gpt2, transformers_program
from speedrun.model.exported import card, save_folder, tokenizer_file
from speedrun.model.weights import WEIGHTS, Trained

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
        weights, config, files = transformers_program.parts(trained)
        reads = "JAX computes its logits (`pip install jax`), without a cache and without gradients."
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


def _json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
