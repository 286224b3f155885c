"""The contract of a recipe: a toy from outside the package that uses all of it, and recipes that break it."""

import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_run import runs_of
from test_checkpoint import went_on
from test_muon import slow_orthogonalize

from speedrun.data.shards import open_shard
from speedrun.ground import mesh, plugins, runlog
from speedrun.ground.errors import UsageError
from speedrun.ground.plugins import resolve
from speedrun.ground.sourcefile import RECIPES_VARIABLE
from speedrun.ledger.assemble import assemble
from speedrun.ledger.findings import Examination, Stretch, Wanted
from speedrun.ledger.record import load
from speedrun.ledger.validate import validate
from speedrun.referee.examiner import examine
from speedrun.referee.handover import hand_over
from speedrun.science import recipes
from speedrun.science.inputs import Inputs
from speedrun.science.recipe import Batch, Recipe
from speedrun.training.checkpoint import folder_of
from speedrun.training.prepare import RunConfig, prepare
from speedrun.training.program import Program
from speedrun.training.train import train

FILE = Path(__file__).parent / "toy89" / "toy89.py"


@pytest.fixture(scope="module")
def toy() -> Iterator[Recipe]:
    """The recipe, loaded by its path as users do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RECIPES_VARIABLE, "")
        yield recipes.load(resolve(str(FILE)))
    plugins.forget(["speedrun.science.recipes.toy89"])


@pytest.fixture(scope="module")
def batches(toy: Recipe, smoke_data: Path) -> list[np.ndarray]:
    """Packed documents of the first shard for every step, from the rule: [B, T + 1] with the shape of its stage."""
    shard = open_shard(min(smoke_data.glob("smoke_train_*")), vocab_size=256)
    text = shard.read(0, shard.num_tokens).tolist()
    starts = [i for i, token in enumerate(text) if token == 0]
    documents = (text[i:j] for i, j in pairwise(starts))
    made = []
    for stage in toy.stages:
        for _ in range(stage.num_steps):
            rows = []
            for _ in range(stage.num_sequences):
                row = []
                while len(row) <= stage.seq_len:
                    row += next(documents)[: stage.document_tokens]
                rows.append(row[: stage.seq_len + 1])
            made.append(np.array(rows, np.int32))
    return made


# --- a plain loop as reference: named parameters, one device, no packing, float64 optimisers


class PlainAdam:
    """Adam with bias correction, from its formula."""

    def __init__(self, beta1: float, beta2: float, lr: float) -> None:
        self.betas, self.lr, self.m, self.v, self.t = (beta1, beta2), lr, 0.0, 0.0, 0

    def move(self, grad: np.ndarray, lr_scale: float) -> np.ndarray:
        """Return the change of the parameter."""
        (b1, b2), self.t = self.betas, self.t + 1
        self.m, self.v = b1 * self.m + (1 - b1) * grad, b2 * self.v + (1 - b2) * grad**2
        m, v = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        return -self.lr * lr_scale * m / (np.sqrt(v) + 1e-8)


class PlainNorMuon:
    """NorMuon of one matrix, from its formula; rows are the shorter side."""

    def __init__(self, lr: float, decay: float) -> None:
        self.lr, self.decay, self.m, self.s = lr, decay, 0.0, 0.0

    def move(self, p: np.ndarray, grad: np.ndarray, momentum: float, lr_scale: float) -> np.ndarray:
        """Return the change of the parameter."""
        if p.shape[0] > p.shape[1]:
            return self.move(p.T, grad.T, momentum, lr_scale).T
        self.m = momentum * self.m + (1 - momentum) * grad
        x = slow_orthogonalize(momentum * self.m + (1 - momentum) * grad, 5)
        self.s = 0.9 * self.s + 0.1 * (x**2).mean(axis=1, keepdims=True)
        d = x / np.sqrt(np.maximum(self.s, 1e-10))
        d *= np.linalg.norm(x) / np.linalg.norm(d)
        rate = self.lr * lr_scale
        return -rate * (d + self.decay * rate * p * (d * p >= 0))


@pytest.fixture(scope="module")
def plain_losses(toy: Recipe, batches: list[np.ndarray]) -> list[float]:
    """Losses of the reference."""
    recipe = toy
    table, opt, program = recipe.table(recipe.config), recipe.optimizer, Program(recipe, mesh.make_mesh(1))
    layout, kernels = program.layout, program.kernels
    params: dict[str, Any] = {
        k: np.float64(v) for k, v in layout.unpack(layout.init(jax.random.key(0))).items()
    }
    betas = {
        "head": (0.5, 0.95),
        "embed": (0.5, 0.95),
        "bigram": (0.75, 0.95),
        "scalar": (0.9, 0.95),
        "gate": (0.9, 0.99),
    }
    adams = {k: PlainAdam(*betas[s.group], opt.adam_lr) for k, s in table.items() if s.group != "matrix"}
    muons: dict[tuple[str, int], PlainNorMuon] = {}
    waiting: dict[str, Any] = dict.fromkeys(adams, 0.0)
    carry, fixed = {"amax": jnp.ones(8)}, recipe.constants(recipe.config, ())

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def differentiate(p, batch, now):
        out = recipe.loss(
            p, batch, Inputs(now, {"window_blocks": (1, 5)}), recipe.config, kernels, recipe.forward
        )
        return out.objective, out

    losses = []
    for step, ids_BT in enumerate(batches):
        now = recipe.schedule.at(step, recipe.num_steps) | fixed
        batch = Batch(jnp.asarray(ids_BT[:, :-1]), jnp.asarray(ids_BT[:, 1:]), carry)
        p32 = {k: jnp.float32(v) for k, v in params.items()}
        (_, out), grads = differentiate(p32, batch, {k: v for k, v in now.items() if k != "adam"})
        losses.append(float(out.nll))
        carry = out.carry
        for name in ("qkv", "out", "up", "down"):
            p, g = (np.float64(x[name]).reshape(-1, *table[name].shape[-2:]) for x in (params, grads))
            moved = [
                muons.setdefault((name, i), PlainNorMuon(opt.matrix_lr, opt.decay)).move(
                    p[i], g[i], now["momentum"], now["lr_scale"]
                )
                for i in range(len(p))
            ]
            params[name] = params[name] + np.stack(moved).reshape(params[name].shape)
        waiting = {k: waiting[k] + np.float64(grads[k]) for k in adams}
        if step % 2 == 0:
            continue
        if now["tied"]:
            waiting["head"] = waiting["head"] + waiting["embed"]
        for name in adams:
            if name != "embed" or not now["tied"]:
                params[name] = params[name] + adams[name].move(waiting[name], now["lr_scale"])
        if now["tied"]:
            params["embed"] = params["head"]
        if now["untie"]:
            head, embed = adams["head"], adams["embed"]
            embed.m, embed.v, embed.t = head.m, head.v, head.t
        waiting = dict.fromkeys(adams, 0.0)
    return losses


def test_the_gradient_of_its_loss_is_that_of_the_definition(toy):
    module = sys.modules[toy.loss.__module__]
    kx, kh = jax.random.split(jax.random.key(0))
    x_ND, head_VD = 3 * jax.random.normal(kx, (6, 4)), jax.random.normal(kh, (11, 4))
    ids_T = jnp.array([[3, 1, 10, 0, 5, 2]])
    targets_NM = module.targets_ahead(ids_T, 3)[0]
    assert targets_NM.tolist()[-2:] == [[5, 2, -1], [2, -1, -1]]

    def definition(x_ND, head_VD):
        logp_NV = jax.nn.log_softmax(module.CAP * jnp.tanh(x_ND @ head_VD.T / module.CAP))
        parts = [sum(logp_NV[n, ids_T[0, n + m]] for n in range(6 - m)) for m in range(3)]
        return -(1.0 * parts[0] + 0.5 * parts[1] + 0.25 * parts[2])

    def ours(x_ND, head_VD):
        return module.nll_sums(x_ND, head_VD, targets_NM) @ jnp.array([1.0, 0.5, 0.25])

    both = [jax.value_and_grad(f, argnums=(0, 1))(x_ND, head_VD) for f in (ours, definition)]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-5), *both)


@pytest.mark.compile
def test_the_toy_trains_on_one_device_like_a_plain_loop(toy, batches, plain_losses):
    program, steps, losses = Program(toy, mesh.make_mesh(1), vocabulary=()), {}, []
    state = program.init(jax.random.key(0))
    for step, ids_BT in enumerate(batches):
        static = program.shape_at(step).static
        train_step = steps.setdefault(static, program.train_step_for(static))
        batch = (mesh.place(x, program.mesh) for x in (ids_BT[:, :-1], ids_BT[:, 1:]))
        state, metrics = train_step(state, *batch, program.schedule)
        losses.append(float(metrics.loss))
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-6)
    assert losses[-1] < losses[0] - 0.3


@pytest.fixture(scope="module")
def finished(toy: Recipe, smoke_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A whole run on eight devices, with checkpoints."""
    out = tmp_path_factory.mktemp("toy") / "record"
    config = RunConfig("smoke-cpu", out, recipe=toy.name, data=smoke_data, checkpoint_every=5)
    train(config)
    return config


@pytest.mark.compile
def test_a_run_on_eight_devices_is_a_record_with_the_same_losses(toy, plain_losses, finished):
    (log,) = finished.out.glob("runs/*/metrics.jsonl")
    events = [line.event for line in runlog.read(log)]
    losses = [event.loss for event in events if isinstance(event, runlog.Step)]
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-6)
    *_, last = [event for event in events if isinstance(event, runlog.Val)]
    assert (last.step, last.tokens) == (toy.num_steps, 131072)
    assemble(finished.out, title="toy89")
    report = validate(finished.out)
    assert report.exit_code == 0, [result.messages for result in report.having("failed")]


@pytest.mark.compile
def test_the_referee_trains_it_again_with_its_constants(toy, finished, tmp_path):
    (log,) = finished.out.glob("runs/*/metrics.jsonl")
    events = [line.event for line in runlog.read(log)]
    config = {
        "track": "smoke-cpu",
        "recipe": toy.name,
        "out": str(tmp_path / "out"),
        "data": str(finished.data),
    }
    hand_over(Wanted(config, tmp_path / "programs"))
    request = Examination(
        programs=tmp_path / "programs",
        track="smoke-cpu",
        data=finished.data,
        run_seed=0,
        num_devices=8,
        replicas=1,
        checkpoints=folder_of(finished.out),
        stretches=(Stretch(0, 3, from_checkpoint=False), Stretch(5, 9, from_checkpoint=True)),
        draws=1,
        findings=tmp_path / "findings.json",
    )
    found = examine(request)
    losses = tuple(event.loss for event in events if isinstance(event, runlog.Step))
    assert [stretch.losses for stretch in found.stretches] == [losses[:3], losses[5:]]
    (run,) = load(finished.out).runs
    assert (found.final_hash, found.leak) == (run.end.final_hash, 0.0)
    assert found.val_loss == pytest.approx(run.val_loss, abs=1e-5)


@pytest.mark.compile
def test_a_run_that_goes_on_ends_with_the_same_bytes(finished, tmp_path):
    """Carried values and gradients that wait for an update are in the checkpoint."""
    (old,) = runs_of(finished.out)
    _, new = went_on(finished, tmp_path, 5)
    assert new.end.final_hash == old.end.final_hash


def returning(result: str) -> str:
    """Change the optimiser of the toy: its update returns this, made of `moves` and `state`."""
    return (
        "import jax\n"
        "class Changed(toy89.Optimizer):\n"
        "    def transform(self, layout):\n"
        "        inner = super().transform(layout)\n"
        "        def update(*given, **more):\n"
        "            moves, state = inner.update(*given, **more)\n"
        f"            return {result}\n"
        "        return inner._replace(update=update)\n"
        "CHANGES = {'optimizer': Changed()}"
    )


#: Changes of the toy with one mistake, and what the error must say.
MISTAKES = {
    "objective": (
        "def loss(*given):\n"
        "    found = toy89.loss(*given)\n"
        "    return found._replace(objective=found.objective.astype('bfloat16'))\n"
        "CHANGES = {'loss': loss}",
        r"its loss returns: objective is bfloat16\[\], need float32\[\]",
    ),
    "nll": (
        "def loss(*given):\n"
        "    found = toy89.loss(*given)\n"
        "    return found._replace(nll=found.nll[None])\n"
        "CHANGES = {'loss': loss}",
        r"its loss returns: nll is float32\[1\], need float32\[\]",
    ),
    "nll_of_python": (
        "def loss(*given): return toy89.loss(*given)._replace(nll=0.0)\nCHANGES = {'loss': loss}",
        r"its loss returns: nll is float, need float32\[\]",
    ),
    "loss": (
        "def loss(*given): return tuple(toy89.loss(*given))\nCHANGES = {'loss': loss}",
        "its loss returns a tuple; need a Loss",
    ),
    "forward_rank": (
        "def forward(*given): return toy89.forward(*given)[0]\nCHANGES = {'forward': forward}",
        r"its forward returns float32\[64, 16\] for int32\[1, 64\]; need hidden states \[1, 64, D\]",
    ),
    "forward_length": (
        "def forward(*given): return toy89.forward(*given)[:, 1:]\nCHANGES = {'forward': forward}",
        r"its forward returns float32\[1, 63, 16\] for int32\[1, 64\]; need",
    ),
    "logits_rank": (
        "def logits(*given): return toy89.logits(*given)[None]\nCHANGES = {'logits': logits}",
        r"its logits are \[1, 64, 256\] for 64 hidden states; config.vocab_size asks for 256 columns",
    ),
    "state_dtype": (
        returning("moves, jax.tree.map(lambda x: x.astype('float32'), state)"),
        r"its optimizer's update returns the state: \S+count is float32\[\], need int32\[\]",
    ),
    "state_shape": (
        returning("moves, jax.tree.map(lambda x: x[None], state)"),
        r"its optimizer's update returns the state: \S+ is float32\[1, 32, 16\], need float32\[32, 16\]",
    ),
    "state_lost": (
        returning("moves, state._replace(pair=())"),
        r"its optimizer's update returns the state: pair\S+ is nothing, need float32\[",
    ),
    "state_containers": (
        returning(
            "moves, state._replace(pair=state.pair._replace(inner={k: [*v] for k, v in state.pair.inner.items()}))"
        ),
        "its optimizer's update returns the state: the arrays of init in other containers",
    ),
    "update_shape": (
        returning("moves | {'embed': moves['embed'][:1]}, state"),
        r"its optimizer updates: embed is \[1, 16\], need \[32, 16\]",
    ),
    "update_lost": (
        returning("{k: v for k, v in moves.items() if k != 'embed'}, state"),
        r"its optimizer updates: embed is nothing, need \[32, 16\]",
    ),
    "python_input": (
        "class Counting(toy89.Schedule):\n"
        "    def at(self, *at): return super().at(*at) | {'count': at[0]}\n"
        "CHANGES = {'schedule': Counting(), 'stages': (replace(toy89.RECIPE.stages[1], num_steps=32),)}",
        "its schedule gives 'count' as 33 Python values, .* need at most 32; give a NumPy value",
    ),
    "key": (
        "WIDTHS = {}\ndef forward(*given): return WIDTHS['wide']\nCHANGES = {'forward': forward}",
        r"\S+/bad_key.py:5: no 'wide' in its table, carry or schedule",
    ),
    "logits": (
        "def logits(*given): return toy89.logits(*given)[:, :-1]\nCHANGES = {'logits': logits}",
        "its logits are .64, 255. for 64 hidden states; config.vocab_size asks for 256 columns",
    ),
    "group": (
        "def table(cfg): return {k: replace(p, group='valve') if k == 'gates' else p for k, p in TABLE(cfg).items()}\n"
        "TABLE, CHANGES = toy89.table, {'table': table}",
        "no transformation for group 'valve'",
    ),
    "schedule": (
        "class Short(toy89.Schedule):\n"
        "    def at(self, *at): return {k: v for k, v in super().at(*at).items() if k != 'momentum'}\n"
        "CHANGES = {'schedule': Short()}",
        "give no input 'momentum'; they give",
    ),
    "window": (
        "class Closing(toy89.Schedule):\n"
        "    def at(self, *at): return super().at(*at) | {'window_blocks': np.int32(at[1] - at[0])}\n"
        "CHANGES = {'schedule': Closing()}",
        "its schedule gives a window 'window_blocks' of 0 blocks; need at least 1",
    ),
    "float": (
        "class Falling(toy89.Schedule):\n"
        "    def at(self, *at): return super().at(*at) | {'lr_scale': 1 - at[0] / at[1]}\n"
        "CHANGES = {'schedule': Falling()}",
        "gives 'lr_scale' as 1.0; need a bool, int or str",
    ),
    "batch": (
        "def loss(p, batch, *given): return toy89.loss(p, batch._replace(targets_BT=batch.masks_BT), *given)\n"
        "CHANGES = {'loss': loss}",
        "reads batch.masks_BT; a batch has tokens_BT, targets_BT, carry",
    ),
    "carry": (
        "def carry(cfg): return {}\nCHANGES = {'carry': carry}",
        "no 'amax' in its table, carry or schedule",
    ),
    "both": (
        "def constants(*given): return toy89.constants(*given) | {'tied': np.ones(1, bool)}\n"
        "CHANGES = {'constants': constants}",
        "its schedule and its constants give 'tied'; rename one of them",
    ),
    "large": (
        "def constants(*_): return {'signs': np.ones((2**25 + 1,), np.int8)}\n"
        "CHANGES = {'constants': constants}",
        "its constants have 33,554,433 bytes; need 33,554,432 or less",
    ),
    "objects": (
        "def constants(*_): return {'signs': np.array(['+', '-'], object)}\n"
        "CHANGES = {'constants': constants}",
        "its constants give 'signs' as an array of object; need NumPy numbers of 32 bits or less",
    ),
    "wide": (
        "def constants(*_): return {'signs': np.ones(2, np.int64)}\nCHANGES = {'constants': constants}",
        "its constants give 'signs' as an array of int64; need NumPy numbers of 32 bits or less",
    ),
    "list": (
        "def constants(*_): return {'signs': [1, -1]}\nCHANGES = {'constants': constants}",
        "its constants give 'signs' as list; need NumPy numbers of 32 bits or less",
    ),
    "vocabulary_key": (
        "def constants(cfg, vocabulary): return {'prefix': {b'a': 0}[b'b']}\n"
        "CHANGES = {'constants': constants}",
        "its constants end in KeyError.b'b'.; need some for any vocabulary, and for none",
    ),
    "absent": (
        "def constants(*_): return {}\nCHANGES = {'constants': constants}",
        "its schedule and constants give no input 'signs'; they give lr_scale,",
    ),
    "carry_lost": (
        "def loss(*given): return toy89.loss(*given)._replace(carry={})\nCHANGES = {'loss': loss}",
        "its loss carries",
    ),
    "carry_shape": (
        "def carry(cfg): return {'amax': np.ones(2, np.float32)}\n"
        "def loss(p, batch, *given):\n"
        "    one = batch._replace(carry={'amax': batch.carry['amax'][:, 0]})\n"
        "    return toy89.loss(p, one, *given)\n"
        "CHANGES = {'carry': carry, 'loss': loss}",
        "its loss carries",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_recipe_with_a_mistake_is_refused_before_it_is_compiled(
    toy, smoke_data, tmp_path, mistake, monkeypatch
):
    source, said = MISTAKES[mistake]
    monkeypatch.setenv(RECIPES_VARIABLE, str(FILE.parent))
    imports = (
        "from dataclasses import replace\nimport numpy as np\nfrom speedrun.science.recipes import toy89\n"
    )
    recipe = f"RECIPE = replace(toy89.RECIPE, name='bad_{mistake}', **CHANGES)\n"
    file = tmp_path / f"bad_{mistake}.py"
    file.write_text(f"{imports}{source}\n{recipe}")
    with pytest.raises(UsageError, match=f"^recipe bad_{mistake}: .*{said}") as info:
        prepare(RunConfig("smoke-cpu", tmp_path / "out", recipe=resolve(str(file)), data=smoke_data))
    assert "\n" not in str(info.value)
