"""lm-evaluation-harness on a trained model, for tasks that this package does not score by itself.

It is imported when it is asked for: pip install lm-eval. Its tasks load data from the hub. Those that ask for new text
are refused: no model of this size answers them.

Source: Gao et al., EleutherAI/lm-evaluation-harness.
"""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from speedrun.ground.errors import DataError, UsageError
from speedrun.trained.likelihood import Row, endings
from speedrun.trained.weights import Trained
from speedrun.trained.words import Words


def scores(
    trained: Trained, words: Words, tasks: Sequence[str], limit: int | None, say: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    """Run tasks; return their metrics by task and name.

    Args:
        trained: the model.
        words: its tokenizer.
        tasks: names, or files of YAML that define one.
        limit: questions of each task; None: all.
        say: gets lines of progress.

    Raises:
        UsageError: if the harness is not installed, a task is unknown, or ids stand for no text.
        DataError: if the data of a task cannot be loaded.
    """
    try:
        harness = importlib.import_module("lm_eval")
        tasks_of = importlib.import_module("lm_eval.tasks").TaskManager
    except ModuleNotFoundError as error:
        raise UsageError(f"--tasks needs {error.name}; type: pip install lm-eval") from None
    if words.encoder is None:
        raise UsageError(f"ids of {words.track.id} stand for no text; tasks need a model of text")
    known = tasks_of()
    for task in tasks:
        if not Path(task).is_file() and not known.match_tasks([task]):
            raise UsageError(f"unknown task {task!r}; 'lm-eval ls tasks' lists them, or name a file of YAML")
    try:
        found = harness.simple_evaluate(
            model=adapter(trained, words, say),
            tasks=[*tasks],
            limit=limit,
            task_manager=known,
            bootstrap_iters=0,
        )
    except (OSError, ValueError, yaml.YAMLError) as error:  # of the hub, `datasets`, and files of tasks
        reason = str(error).strip().partition("\n")[0]
        raise DataError(f"a task cannot be run: {reason}; its data must be here, or on the hub") from None
    return {
        task: {name.removesuffix(",none"): x for name, x in metrics.items() if isinstance(x, float)}
        for task, metrics in found["results"].items()
    }


def adapter(trained: Trained, words: Words, say: Callable[[str], None]) -> Any:
    """Return the model in the form that the harness asks: an instance of its `TemplateLM`."""
    template = importlib.import_module("lm_eval.api.model").TemplateLM
    windows = importlib.import_module("lm_eval.utils")
    longest, opens = trained.program.recipe.eval_seq_len, trained.track.data.document_token

    class Model(template):
        """Longer contexts are cut at their start."""

        eot_token_id = opens

        def tok_encode(self, string: str, add_special_tokens: Any = None, **_: Any) -> list[int]:
            del add_special_tokens  # there are none
            return [*map(int, words.encode(string)[1:])]

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            rows = [_row(context, ending, longest) for _, context, ending in requests]
            found = endings(trained, rows, lambda done: say(f"{done:,} of {len(rows):,} endings"))
            return [(-float(one.nll_E.sum()), one.is_likeliest) for one in found]

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
            found = []
            for (text,) in (request.args for request in requests):
                parts = windows.get_rolling_token_windows(self.tok_encode(text), opens, longest - 1, 1)
                pairs = [("", *windows.make_disjoint_window(part)) for part in parts]
                found.append(sum(nats for nats, _ in self._loglikelihood_tokens(pairs)))
            return found

        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            raise UsageError(f"{len(requests)} questions ask for new text; tasks that score given text work")

    return Model()


def _row(context: list[int], ending: list[int], longest: int) -> Row:
    if len(ending) >= longest:
        raise UsageError(
            f"an ending of {len(ending):,} tokens; the model takes {longest:,} with its context; leave that task out"
        )
    ids = np.array([*context, *ending][-longest:], np.int32)
    return Row(ids, max(1, len(ids) - len(ending)))
