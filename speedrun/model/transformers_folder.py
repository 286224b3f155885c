"""A folder that transformers loads, of a model that it knows: a GPT-2."""

from pathlib import Path
from typing import Any

import msgspec

from speedrun.base.errors import UsageError
from speedrun.data.tokenizer import END_OF_TEXT
from speedrun.model import transformers_gpt2
from speedrun.model.exported import card, save_folder, tokenizer_file
from speedrun.model.weights import WEIGHTS, Trained

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
    """Write the folder; return its files.

    Raises:
        UsageError: if the folder is not new or empty, or the model is no GPT-2.
        DataError: if the tokenizer's file is missing.
    """
    from safetensors.numpy import save

    if not transformers_gpt2.fits(trained):
        name = trained.program.recipe.name
        raise UsageError(
            f"transformers has no architecture like {name}'s; choose --to safetensors or --to web"
        )
    weights, config = transformers_gpt2.parts(trained)
    own = {name: raw for name, raw in tokenizer_file(trained).items() if name == "tokenizer.json"}
    if own:
        own["tokenizer_config.json"] = _json(
            {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
        )
    tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("{out.name if own else "gpt2"}")'
    if trained.track.synthetic is not None:
        tokenizer = "# Its ids are those of synthetic data, and stand for no text."
    load = _LOAD.format(name=out.name, tokenizer=tokenizer, document_token=trained.track.data.document_token)
    files = {
        WEIGHTS: save(weights, metadata={"format": "pt"}),  # without it, transformers refuses the file
        transformers_gpt2.CONFIG: _json(config),
        "README.md": card(trained, "transformers", load).encode(),
    }
    return save_folder(trained, out, files | own)


def _json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
