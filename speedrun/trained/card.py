"""The model card of an exported model: what it is, what its record measured, and what it is not."""

from speedrun.ground.console import clean
from speedrun.ledger import record as records
from speedrun.ledger.assemble import sources
from speedrun.ledger.run import loss_of
from speedrun.science.params import count
from speedrun.trained.weights import Trained

_CARD = """\
---
library_name: "{library}"
pipeline_tag: "text-generation"
tags: ["speedrun", "{recipe}"]
# license: the licence of these weights is for you to choose; write it here
---

# {recipe} on {track}

A language model, trained by `speedrun`, a speedrun harness in JAX.

| | |
|---|---|
{rows}

## Load it

{load}
## Intended use and limits

A model of a speedrun: made to reach a loss in the least time, or to study how. It continues text like that of its
training. It was not trained to follow instructions or to be correct, safe or fair, and nobody tested it for any of
these. It writes falsehoods, and what it read may come back. Do not use it where somebody relies on what it says.
"""


def card(trained: Trained, library: str, load: str) -> str:
    """Return the card in Markdown with the hub's front matter; `load` says how to load the model with `library`."""
    recipe, track = trained.program.recipe, trained.track
    facts = {
        "recipe": f"{recipe.name}, revision {recipe.revision}: {clean(recipe.summary)}",
        "changed settings": ", ".join(f"{key}={value}" for key, value in trained.overrides.items()) or "none",
        "parameters": f"{count(trained.program.layout.table):,}",
        "track": f"{track.id}: {track.summary}",
        "steps": f"{trained.step:,} of {recipe.num_steps:,}",
        "context": f"{recipe.eval_seq_len:,} tokens",
        **_of_the_run(trained),
    }
    rows = "\n".join(f"| {name} | {value.replace('|', '/')} |" for name, value in facts.items())
    return _CARD.format(library=library, recipe=recipe.name, track=track.id, rows=rows, load=load)


def _of_the_run(trained: Trained) -> dict[str, str]:
    """Return what the record says about the run that trained the weights; nothing if it does not lie here."""
    if trained.run is None or not (trained.run[0] / "runs").is_dir():
        return {}
    record = records.load(trained.run[0])
    run = next((run for run in record.runs if run.folder == trained.run[1]), None)
    if run is None:
        return {}
    val = next((val for val in run.vals if val.step == trained.step), None)
    loss = f"not measured after step {trained.step:,}"
    if val is not None:
        loss = (
            f"{loss_of(val):.4f} nats per token, on {val.tokens:,} tokens in sequences of "
            f"{trained.program.recipe.eval_seq_len:,}; with another context or tokenizer, none compares"
        )
    return {
        "run": clean(run.folder),
        "date": run.begun.date().isoformat(),
        "hardware": clean("{} x {}".format(*run.hardware)),
        "started from": clean(", ".join(sources(record.runs))) or "random weights",
        "validation loss": loss,
    }
