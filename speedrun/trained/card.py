"""The model card of an exported model, made from its record: what it is, what it was measured to do, what it is not."""

import json

from speedrun.ground.console import clean, duration
from speedrun.ledger import record as records
from speedrun.ledger.assemble import sources
from speedrun.ledger.run import Run, loss_of
from speedrun.trained.weights import Trained

_LIMITS = """\
## Intended use and limits

A model of a speedrun: made to reach a loss in the least time, or to study how. It continues text like that of its
training. It was not trained to follow instructions or to be correct, safe or fair, and nobody tested it for any of
these. It writes falsehoods, and what it read may come back. Do not use it where somebody relies on what it says.
"""

_OURS = """\
## Load it

```sh
speedrun sample {name} {prompt}
speedrun eval {name}
```

Or, without this harness, as arrays by name; `model.json` says what the model is, and its `settings` which functions of
speedrun {version} compute it:

```python
from safetensors.numpy import load_file

params = load_file("{name}/model.safetensors")
```

"""

_THEIRS = """\
## Load it

```python
from transformers import AutoModelForCausalLM{more_imports}

model = AutoModelForCausalLM.from_pretrained("{name}")
{tokenizer}
```

Token {document_token} opens every document: begin a prompt with it. The harness that trained it reads the folder, too:
`speedrun sample {name}`.
"""


def ours(trained: Trained, num_params: int, name: str, *, tokenizer: str, version: str) -> str:
    """Return the card of a folder that `exported` writes, in Markdown with the hub's front matter."""
    prompt = "--ids 0,1,2" if trained.track.synthetic is not None else "--prompt 'Once'"
    words = f"The tokenizer is in `{tokenizer}`."
    if not tokenizer:
        is_gpt2 = trained.track.synthetic is None
        words = (
            "The tokenizer is GPT-2's, `r50k_base` of tiktoken." if is_gpt2 else "Its ids stand for no text."
        )
    load = _OURS.format(name=name, prompt=prompt, version=version)
    return _card(trained, num_params, "speedrun", f"{load}{words}\n")


def transformers(trained: Trained, num_params: int, name: str, *, tokenizer: str) -> str:
    """Return the card of a folder for the library transformers."""
    words = {
        "tokenizer.json": f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        "": "# Its ids are those of synthetic data, and stand for no text.",
    }
    of_gpt2 = 'tokenizer = AutoTokenizer.from_pretrained("gpt2")  # the vocabulary is that of GPT-2'
    load = _THEIRS.format(
        name=name,
        more_imports=", AutoTokenizer" if tokenizer else "",
        tokenizer=words.get(tokenizer, of_gpt2),
        document_token=trained.track.data.document_token,
    )
    return _card(trained, num_params, "transformers", load)


def _card(trained: Trained, num_params: int, library: str, load: str) -> str:
    recipe, track = trained.program.recipe, trained.track
    title, facts = f"{recipe.name} on {track.id}", _of_the_run(trained)
    title = facts.pop("title", title)
    rows = {
        "recipe": f"{recipe.name}, revision {recipe.revision}: {clean(recipe.summary)}",
        "changed settings": ", ".join(f"{key}={value}" for key, value in trained.overrides.items()) or "none",
        "parameters": f"{num_params:,}",
        "track": f"{track.id}: {track.summary}",
        "steps": f"{trained.step:,} of {recipe.num_steps:,}",
        "tokens": f"{_tokens(trained):,}",
        "context": f"{recipe.eval_seq_len:,} tokens",
        **facts,
    }
    table = "\n".join(f"| {name} | {value.replace('|', '/')} |" for name, value in rows.items())
    head = {"library_name": library, "pipeline_tag": "text-generation", "tags": ["speedrun", recipe.name]}
    if track.data.hub is not None:
        head["datasets"] = [track.data.hub.repo]
    front = "\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items())  # YAML reads JSON
    return "\n".join(
        [
            f"---\n{front}\n# license: the licence of these weights is for you to choose; write it here\n---\n",
            f"# {title}\n\nA language model, trained by `speedrun`, a speedrun harness in JAX.\n",
            f"| | |\n|---|---|\n{table}\n",
            load,
            _LIMITS,
        ]
    )


def _tokens(trained: Trained) -> int:
    recipe, left, tokens = trained.program.recipe, trained.step, 0
    for stage in recipe.stages:
        steps = min(left, stage.num_steps)
        tokens, left = tokens + steps * stage.batch_tokens, left - steps
    return tokens


def _of_the_run(trained: Trained) -> dict[str, str]:
    """Return what the record says about the run that trained the weights; nothing if it does not lie here."""
    if trained.run is None or not (trained.run[0] / "runs").is_dir():
        return {}
    record = records.load(trained.run[0])
    run = next((run for run in record.runs if run.folder == trained.run[1]), None)
    if run is None:
        return {}
    return {
        "validation loss": _loss(trained, run),
        "train time": f"{duration(run.train_time_s)} for all steps" if run.finished else "the run broke off",
        "hardware": clean("{} x {}".format(*run.hardware)),
        "date": run.begun.date().isoformat(),
        "seed": str(run.start.seed),
        "run": clean(run.folder),
        "started from": clean(", ".join(sources(record.runs))) or "random weights",
        "title": clean(record.about.title),
        "authors": clean(", ".join(record.about.authors)) or "not named",
    }


def _loss(trained: Trained, run: Run) -> str:
    scored = [val for val in run.vals if val.step == trained.step]
    if not scored:
        return f"not measured after step {trained.step:,}"
    context = trained.program.recipe.eval_seq_len
    return (
        f"{loss_of(scored[-1]):.4f} nats per token, on {scored[-1].tokens:,} tokens in sequences of {context:,}; "
        "losses with another context or tokenizer do not compare"
    )
