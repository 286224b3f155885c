"""For each check, forged records that this check alone refuses. A `Build` writes one into a folder."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace
from record_forge import (
    CONFIG,
    PAUSE_S,
    PROGRAMS,
    RECIPE,
    SOFTWARE,
    VAL_S,
    VAL_TOKENS,
    Edit,
    Moments,
    Spec,
    alone,
    both,
    change,
    commit_of,
    edit_track,
    forge,
    moments,
    shard,
    state,
    write_run,
)

from speedrun.base import rounds, runlog, track
from speedrun.base.runlog import DataRead, ShardRange
from speedrun.record.archive import name_of, pack
from speedrun.record.batch import Look, Preregistration, seeds_from
from speedrun.record.git_history import files_here
from speedrun.record.layout import config_sha256, sha256
from speedrun.record.reader import encode, load, read_programs
from speedrun.record.reproduction import Hardware, Outcome, Reproduction, outcome_of
from speedrun.record.summary import assemble

Build = Callable[[Path], object]


def place_of(log: Moments, kind: type[runlog.Event], nth: int = 0) -> int:
    return [place for place, moment in enumerate(log) if isinstance(moment.event, kind)][nth]


def left_off(log: Moments) -> Moments:
    """The log of a run that was killed in its second pause, after a checkpoint."""
    fifth = place_of(log, runlog.ClockPause, 1)
    kept = log[fifth]._replace(event=runlog.Checkpoint(4, "e" * 16, 0.1), mono_ns=log[fifth].mono_ns - 500)
    return [*log[:fifth], kept]


def went_on(log: Moments) -> Moments:
    start, fifth = place_of(log, runlog.ClockStart), place_of(log, runlog.ClockPause, 1)
    fourth = log[place_of(log, runlog.Step, 3)].event
    assert isinstance(fourth, runlog.Step)
    resume = runlog.Resume("tiny-1-0000", 4, "e" * 16, fourth.train_time_s, fourth.tokens_seen, fourth.cursor)
    begun = log[fifth]._replace(event=log[start].event, mono_ns=log[fifth].mono_ns - 500)
    left = [*log[:start], log[start]._replace(event=resume), begun, *log[fifth:]]
    rest = data(shard("t_train_1.bin", 400, 600), shard("t_train_2.bin", 0, 400))
    return change(runlog.RunEnd, data=rest, val_s=3 * VAL_S)(left)


def moved_up(to: type[runlog.Event], nth: int) -> Edit:
    """Swap an event with the one before it."""

    def edit(log: Moments) -> Moments:
        at = place_of(log, to, nth)
        before, moved = log[at - 1], log[at]
        log[at - 1 : at + 1] = [before._replace(event=moved.event), moved._replace(event=before.event)]
        return log

    return edit


def said_to_have_broken_off(log: Moments) -> Moments:
    """A run whose loss became non-finite, but whose end has the status of one that crashed."""
    blown = runlog.Error("NonFiniteError", "step 9: loss is nan")
    end = replace(log[-1].event, status="aborted", val_loss=None)
    stop = place_of(log, runlog.ClockStop)
    return [*log[:stop], log[-2]._replace(event=blown), log[-1]._replace(event=end)]


def broken_off(log: Moments) -> Moments:
    place = place_of(log, runlog.Step, 5)
    return [*log[:place], log[place]._replace(event=runlog.Error("OSError", "no | space"))]


def pause_for_nothing(log: Moments) -> Moments:
    place = place_of(log, runlog.ClockPause, 1)
    resume = log[place]._replace(event=log[place + 2].event, mono_ns=log[place].mono_ns - 500)
    earlier = log[place]._replace(mono_ns=log[place].mono_ns - 900)
    return [*log[:place], earlier, resume, *log[place:]]


def inserted(event: runlog.AnyEvent, kind: type[runlog.Event], nth: int, ns: int) -> Edit:
    def edit(log: Moments) -> Moments:
        at = place_of(log, kind, nth)
        return [*log[:at], log[at]._replace(event=event, mono_ns=log[at].mono_ns - ns), *log[at:]]

    return edit


def later(log: Moments, seconds: float) -> Moments:
    ns = round(seconds * 1e9)
    return [moment._replace(mono_ns=moment.mono_ns + ns, utc_ns=moment.utc_ns + ns) for moment in log]


def shifted(kind: type[runlog.Event], seconds: float) -> Edit:
    def edit(log: Moments) -> Moments:
        place = place_of(log, kind)
        return [*log[:place], *later(log[place:], seconds)]

    return edit


#: Steps of a tenth of a second to the nanosecond.
EVENLY = change(runlog.Step, train_time_s=lambda step: (step.step + 1) / 10)


def stamped_earlier(kind: type[runlog.Event], seconds: float) -> Edit:
    def edit(log: Moments) -> Moments:
        place = place_of(log, kind)
        log[place] = log[place]._replace(mono_ns=log[place].mono_ns - round(seconds * 1e9))
        return log

    return edit


def ending(**fields) -> Build:
    return logged(change(runlog.RunEnd, **fields))


def shorter(share: float, *kinds: type[runlog.Event]) -> Edit:
    """Shorten the stated train times of some events, but not their stamps."""
    return both(
        *(change(kind, train_time_s=lambda event: event.train_time_s * (1 - share)) for kind in kinds)
    )


TIMED = (runlog.Step, runlog.ClockPause, runlog.ClockResume, runlog.ClockStop, runlog.RunEnd)
EARLIER = both(
    *(
        change(kind, train_time_s=lambda event: event.train_time_s - 0.3)
        for kind in (runlog.Resume, runlog.Step, *TIMED[1:])
    )
)  #: for a run that resumes another after 0.4 s
FEWER_SCORED = change(
    runlog.Val, tokens=VAL_TOKENS // 2, nll_sum=lambda val: (float.fromhex(val.nll_sum) / 2).hex()
)


def held(**fields) -> Edit:
    return change(runlog.HeldOut, val=lambda event: replace(event.val, **fields))


def held_out(loss: float) -> Edit:
    """Another loss of the held-out text, in sequences whose losses differ by 0.1."""
    scored = change(runlog.Val, at=-1, sequences=lambda val: (val.loss,) * 2)
    two = (loss - 0.05, loss + 0.05)
    return both(scored, held(loss=loss, nll_sum=(loss * VAL_TOKENS).hex(), sequences=two))


def scored(step: int, loss: float = 3.25) -> runlog.Val:
    return runlog.Val(step, loss, VAL_TOKENS, (loss * VAL_TOKENS).hex(), 0.1)


def scored_also(val: runlog.Val, before: type[runlog.Event], nth: int = 0) -> Build:
    return logged(inserted(val, before, nth, 500), change(runlog.RunEnd, val_s=4 * VAL_S + 0.1))


def without(*kinds: type[runlog.Event]) -> Edit:
    return lambda log: [moment for moment in log if not isinstance(moment.event, kinds)]


def swapped(log: Moments) -> Moments:
    """Two events in the place of each other, at the same times."""
    first, second = log
    return [second._replace(mono_ns=first.mono_ns, utc_ns=first.utc_ns), second._replace(event=first.event)]


def edited(path: str, old: bytes, new: bytes) -> Build:
    """Replaces bytes in a file of an honest record."""

    def build(folder: Path) -> None:
        forge(folder)
        file = next(folder.glob(path))
        assert old in file.read_bytes()
        file.write_bytes(file.read_bytes().replace(old, new, 1))

    return build


def added(path: str, content: bytes) -> Build:
    def build(folder: Path) -> None:
        forge(folder)
        (folder / path).parent.mkdir(exist_ok=True)
        with (folder / path).open("ab") as file:
            file.write(content)

    return build


def programs(raw: bytes | None, *edits: Edit, named: bytes = b"mine") -> Build:
    """Runs with an edited log that name the programs `named`; their archive holds `raw`, or is missing."""

    def build(folder: Path) -> None:
        logged(change(runlog.Exported, sha256=sha256(named), num_bytes=len(named)), *edits)(folder)
        for honest in folder.glob("programs-*"):
            honest.unlink()
        if raw is not None:
            (folder / name_of(sha256(named))).write_bytes(raw)

    return build


def archived(**fields) -> Build:
    """Runs that name the programs of an archive with other fields."""
    raw = pack(replace(ARCHIVE, **fields))
    return programs(raw, named=raw)


def other_programs(folder: Path) -> None:
    in_one_run(change(runlog.Exported, sha256=sha256(b"others"), num_bytes=6))(folder)
    (folder / name_of(sha256(b"others"))).write_bytes(b"others")


def linked(folder: Path) -> None:
    forge(folder)
    (folder / "source.txt").rename(folder.parent / "elsewhere.txt")
    (folder / "source.txt").symlink_to(folder.parent / "elsewhere.txt")


def with_runs(more: Sequence[Spec], **batch) -> Build:
    def build(folder: Path) -> None:
        forge(folder, **batch)
        for spec in more:
            write_run(folder, spec)
        assemble(folder)

    return build


def in_one_run(edit: Edit) -> Build:
    """A batch in which one run has an edited log."""
    return with_runs([Spec(seed=3, edit_log=edit)], declared=(1, 2, 3))


def made(**spec) -> Build:
    return lambda folder: forge(folder, **spec)


def logged(*edits: Edit) -> Build:
    return made(edit_log=both(*edits))


def reading(*ranges: ShardRange, val: ShardRange | None = None) -> Edit:
    """Replace the ranges that a run read, but not its steps."""
    return change(runlog.RunEnd, data=data(*ranges, val=val))


def other_config(config: dict) -> Edit:
    return change(runlog.RunStart, config=config, config_sha256=config_sha256(config))


def configured(config: dict, *edits: Edit) -> Build:
    return logged(other_config({**CONFIG, "recipe": {**CONFIG["recipe"], **config}}), *edits)


def cutting(*shards, edit: Edit = lambda log: log) -> Build:
    return configured({"stages": [{"num_steps": 10, "document_tokens": 32}]}, edit, reading(*shards))


def science(text: str) -> Build:
    return sourced(RECIPE, lambda _: text)


def sourced(path: str, edit: Callable[[str], str | None]) -> Build:
    """Runs whose source has one file edited, added, or removed if the edit returns None."""

    def edit_source(files):
        text = edit(files.get(path, ""))
        return {k: v for k, v in {**files, path: text}.items() if v is not None}

    return made(edit_source=edit_source)


def extended(path: str, more: str) -> Build:
    return made(edit_source=with_file(path, more))


STAGE = "[[fixed.recipe.stages]]\nnum_sequences = 10\nseq_len = 10\n"
#: The end of a track file that fixes the settings of the forged runs.
FIXED = f"""
[fixed.recipe.config]
width = 8
lr = 0.02
{STAGE}
[fixed.inputs]
window_blocks = 3.0
"""
WINDOWS = (1, 1, 1, 1, 2, 2, 2, 3, 3, 3)


def fixed(*edits: Edit, rules: tuple[str, str] = ("", ""), **spec) -> Build:
    """Runs on a track that fixes the model; `rules` replaces a text in the track file."""

    def build(folder: Path) -> None:
        with (track.TRACKS_DIR / "forged.toml").open("a") as file:
            file.write(FIXED.replace(*rules))
        windows = change(
            runlog.Step, inputs=lambda step: {"lr_scale": 0.5, "window_blocks": WINDOWS[step.step]}
        )
        forge(folder, edit_log=both(windows, *edits), **spec)

    return build


def capped(most_params: int) -> Build:
    """Runs on a track with a cap."""
    rule = f"ranked = true\nmost_params = {most_params}"
    return lambda folder: edit_track("ranked = true", rule) or forge(folder)


def with_file(path: str, more: str) -> Callable[[Mapping[str, str]], dict[str, str]]:
    """Append to a file of the source, or add one."""
    return lambda files: {**files, path: files.get(path, "") + more}


def preflight(**fields) -> Build:
    return logged(change(runlog.Preflight, **fields))


def in_environment(**variables: str) -> Build:
    return preflight(environment=variables)


def on_device(kind: str, gflops: float) -> Build:
    return preflight(device_kind=kind, matmul_gflops=gflops)


ARCHIVE = read_programs(PROGRAMS)
LOWERED = ARCHIVE.platforms["cpu"]
ONE, TWO, SCORED = (
    shard("t_train_1.bin", 0, 600),
    shard("t_train_2.bin", 0, 400),
    shard("t_val_0.bin", 0, VAL_TOKENS),
)
HASH = "0" * 64
LOG = "runs/*1/metrics.jsonl"
LOSS_31 = (change(runlog.Val, at=-1, loss=3.1), change(runlog.RunEnd, val_loss=3.1))
COLD = change(runlog.RunEnd, cold_wall_s=9999.0)
MORE_SHARDS = ["t_train_1.bin", "t_train_2.bin", "t_train_3.bin"]
ALL_SHARDS = ["t_train_1.bin", "t_train_2.bin", "t_val_0.bin"]


def data(*ranges: ShardRange, val: ShardRange | None = None, ids: str = "a" * 64) -> DataRead:
    return DataRead(shards=ranges, val_shard=val or SCORED, val_sha256=ids)


def resumed(edit: Edit = list, left: Edit = list, seed: int = 1) -> Build:
    """A batch with a run that was killed, one that resumes it, and a whole one."""
    first = Spec(seed=seed, attempt="b", edit_log=both(left_off, left))
    moved = both(went_on, change(runlog.Resume, run_id=first.run_id), lambda log: later(log, 60.0))
    last = Spec(seed=seed, edit_log=both(moved, edit))
    return with_runs([first, last], seeds=(seed + 1,), declared=(seed, seed + 1))


def beside(**other) -> Build:
    """A committed record next to an older one."""

    def build(folder: Path) -> None:
        forge(folder)
        root = folder.resolve()
        home = root.parent / "records" / "forged"
        home.mkdir(parents=True)
        forge(home / "older", **other)
        root.rename(home / "newer")
        folder.symlink_to(home / "newer")

    return build


def redeclared(folder: Path) -> None:
    """A batch without the second of the seeds that follow from source and config."""
    spec = Spec()
    first, _, third = seeds_from(spec.source_sha256, config_sha256(CONFIG), 3)
    forge(folder, seeds=(first, third))


def promised(**fields) -> Callable[[Preregistration], Preregistration]:
    return lambda honest: replace(honest, **fields)


def reproduced(**fields) -> Build:
    def build(folder: Path) -> None:
        record = load(forge(folder))
        runs = [(outcome_of(run), run.start.seed + 5) for run in record.finished]
        seen = tuple(replace(one, run_id=f"{seed}", seed=seed, train_time_s=1.001) for one, seed in runs)
        honest = Reproduction(
            record_id=record.id, track="forged@1", by="", created_utc="2026-10-03T00:00:00+00:00",
            software={}, same_seeds=False, points=(), runs=seen,
        )  # fmt: skip
        (folder / "reproduction.json").write_bytes(encode(replace(honest, **fields)))

    return build


def again(outcome: runlog.Outcome, loss: float | None, time_s: float | None) -> tuple[Outcome]:
    return (Outcome("a", 7, outcome, loss, time_s, "", Hardware("cpu", "cpu", 8, 50.0)),)


MATRICES = {"table": (1000, 900), **{f"block.{number}": (100, 100) for number in range(10)}}
OTHER_LOSSES = change(runlog.Step, loss=lambda step: step.loss + 0.001)


def at_seed_1(log: Moments) -> Moments:
    times = iter([m.event.train_time_s for m in moments(Spec(seed=1)) if isinstance(m.event, TIMED)])
    for kind_at in [at for at, moment in enumerate(log) if isinstance(moment.event, TIMED)]:
        log[kind_at] = log[kind_at]._replace(event=replace(log[kind_at].event, train_time_s=next(times)))
    return log


def copied_from_the_fifth_step(log: Moments) -> Moments:
    own = iter([m.event.loss for m in log if isinstance(m.event, runlog.Step)])
    return change(runlog.Step, loss=lambda step: next(own) if step.step < 4 else 4.5 - 0.1 * step.step)(log)


OWN_BATCH = change(runlog.RunEnd, first_batch_sha256="c" * 64)
OTHER_IDS = both(
    change(runlog.DataReady, val_sha256="c" * 64),
    change(runlog.RunEnd, data=lambda end: replace(end.data, val_sha256="c" * 64)),
)
BLEW_UP = change(runlog.RunEnd, status="non-finite", val_loss=None)
BROKE = [Spec(seed=2, attempt=name, edit_log=broken_off) for name in "bc"]
STARTED_ALIKE = both(
    change(runlog.WarmupStart, state_hash="d" * 16), change(runlog.WarmupEnd, state_hash="d" * 16)
)
#: Killed after the last validation.
DISLIKED = Spec(seed=2, attempt="d", edit_log=lambda log: log[:-1])
UNLIKED = Spec(seed=2, attempt="d", edit_log=change(runlog.RunEnd, status="aborted"))
TWO_LOOKS = promised(looks=(Look(2, 0.0005), Look(3, 0.0005)))
#: So far below the target that two runs pass at half the level.
PROVEN = (5.5, 4.0, 3.4, 3.2)
#: A second look, never reached, that would allow two runs to crash.
FAR_LOOK = {
    "val_losses": PROVEN,
    "declared": range(1, 21),
    "promise": promised(looks=(Look(2, 0.0005), Look(20, 0.005))),
}
TWICE = Spec(seed=2, attempt="b", step_s=(0.11,) * 10, edit_log=both(
    OTHER_LOSSES, STARTED_ALIKE, change(runlog.RunEnd, final_hash="c" * 16)))  # fmt: skip
THREE_LOOKS = (Look(2, 0.001), Look(3, 0.001), Look(4, 0.001))
SHORTER = Spec(seed=2, step_s=(0.1,) * 9, shards=(ONE, shard("t_train_2.bin", 0, 300)))


def late(event: bytes) -> Build:
    def build(folder: Path) -> None:
        (log,) = forge(folder).glob(LOG)
        lines = log.read_bytes().splitlines(keepends=True)
        moved = lines.pop(next(i for i, line in enumerate(lines) if event in line))
        start = next(i for i, line in enumerate(lines) if b'"clock_start"' in line)
        log.write_bytes(b"".join([*lines[: start + 1], moved, *lines[start + 1 :]]))

    return build


def any_shards() -> None:
    """Let the track list no digests, so that it permits any shards."""
    rules = track.TRACKS_DIR / "forged.toml"
    lines = [line for line in rules.read_text().splitlines() if not line.strip().startswith('"t_')]
    rules.write_text("\n".join(lines) + "\n")


PAUSED_EARLY = (
    moved_up(runlog.ClockPause, 1),
    moved_up(runlog.Val, 1),
    moved_up(runlog.ClockResume, 1),
)
NO_LOSSES = change(runlog.Val, at=-1, sequences=lambda val: (val.loss - 9e3, val.loss + 9e3))
OTHER_LOCK = "aot.lock"
OTHER_RAW = files_here([f"requirements/{OTHER_LOCK}"])[f"requirements/{OTHER_LOCK}"]
OWN_RUN = Outcome("tiny-1-00a1", 7, "finished", 3.25, 1.0, "", Hardware("cpu", "cpu", 8, 50.0))
FORGERIES: list[tuple[str, str, Build]] = [
    ("V001", "unknown key", edited(LOG, b'"seed"', b'"speed"')),
    ("V001", "an older format", edited(LOG, b'"format":2,', b"")),
    ("V001", "key twice", edited(LOG, b'"i":1,', b'"i":1,"i":1,')),
    ("V001", "a stamp without its zone", edited(LOG, b"01:00:00.200001+00:00", b"01:00:00.200001")),
    ("V001", "torn", added("runs/tiny-1-00a1/metrics.jsonl", b'{"i":')),
    ("V001", "the log of another run", lambda folder: next(forge(folder).glob("runs/*1")).rename(folder / "runs/x")),
    ("V001", "a reproduction with numbers beyond all range", reproduced(runs=again("finished", 1.7e308, 1.0))),
    ("V001", "a seed beyond those that follow from a source", edited(LOG, b'"seed":1,', b'"seed":2147483648,')),
    ("V001", "a sum in another form", edited(LOG, b'"nll_sum":"0x', b'"nll_sum":"0X')),
    ("V001", "the plan comes after the clock", late(b'"plan"')),
    ("V001", "the warm-up ends after the clock began", late(b'"warmup_end"')),
    ("V001", "programs are exported after the clock began", late(b'"exported"')),
    ("V001", "a nonce in another form", edited(LOG, b'"nonce":"0000', b'"nonce":"my l')),
    ("V001", "a line of megabytes", edited(LOG, b'"width":8', b'"width":[%s8]' % (b"8," * 2**21))),
    ("V001", "a config nested too deep", edited(LOG, b'"width":8', b'"width":' + b"[" * 70 + b"]" * 70)),
    ("V001", "a hash that is none", edited(LOG, b'"state_hash":"', b'"state_hash":"the first, ')),
    ("V001", "a step is missing", edited(LOG, b'"step":3,"tr', b'"step":4,"tr')),
    ("V002", "a line was edited", edited(LOG, b'"lr_scale":1.0', b'"lr_scale":0.5')),
    ("V003", "source was edited", edited("source.txt", b"SIZE = 1", b"SIZE = 2")),
    ("V003", "source has a stray line", added("source.txt", b"more = 1\n")),
    ("V003", "other programs", programs(b"others")),
    ("V003", "no programs", programs(None)),
    ("V003", "no source", made(edit_source=lambda _: {})),
    ("V003", "no event of programs", programs(None, without(runlog.Exported))),
    ("V003", "exported twice", logged(inserted(runlog.Exported(HASH, 9, 0.1), runlog.Plan, 0, 500))),
    ("V003", "more behind the archive", programs(PROGRAMS + b"more", named=PROGRAMS + b"more")),
    ("V003", "an archive for no platform", archived(platforms={})),
    ("V003", "an archive of a shorter run", archived(
        document_tokens=(0,) * 9, platforms={"cpu": replace(LOWERED, steps=LOWERED.steps[1:])})),
    ("V003", "an archive without its programs", archived(platforms={"cpu": replace(LOWERED, programs={})})),
    ("V003", "an archive whose state holds only parameters", archived(leaves=("params.w",))),
    ("V003", "an archive of another size", logged(change(runlog.Exported, num_bytes=9))),
    ("V003", "other programs in one run", other_programs),
    ("V003", "an archive that is none", programs(b"mine")),
    ("V003", "programs that no run names", added("programs-0000000000000000.xz", b"more")),
    ("V005", "options of one run", in_one_run(change(runlog.RunStart, overrides={"optimizer.lr": "9"}))),
    ("V005", "a setting that its config does not have",
     logged(change(runlog.RunStart, overrides={"config.lr": "0.9", "size": "tiny"}))),
    ("V005", "config was edited", logged(change(runlog.RunStart, config={**CONFIG, "stages": [11]}))),
    ("V005", "runs differ", in_one_run(other_config({**CONFIG, "stages": [11]}))),
    ("V005", "no number of replicas", logged(other_config({**CONFIG, "replicas": 1.0}))),
    ("V005", "another recipe than its config", logged(change(runlog.RunStart, recipe_revision=2))),
    ("V006", "other digest", logged(change(runlog.RunStart, track_sha256=HASH))),
    ("V007", "other ids at its end", ending(data=data(ONE, TWO, ids="c" * 64))),
    ("V007", "no final state", in_one_run(change(runlog.RunEnd, final_hash=""))),
    ("V007", "a total wall time below the log's", ending(cold_wall_s=2.0)),
    ("V007", "more waited for data than trained", ending(data_wait_s=9.0)),
    ("V007", "less compiled than its events say", ending(compile_s=0.1)),
    ("V007", "a stage with other inputs",
     logged(inserted(runlog.StageChange(2, 0, {"window": 9}), runlog.Step, 2, 500))),
    ("V007", "an error in a run that finished",
     logged(inserted(runlog.Error("OSError", "no space"), runlog.Step, 5, 500))),
    ("V008", "link", linked),
    ("V008", "too big", added("README.md", b" " * 2**20)),
    ("V008", "turned text", added("README.md", "\u202e".encode())),
    ("V008", "an author in turned text", edited("about.json", b"nobody", "no\u202ebody".encode())),
    ("V008", "code behind a comment that ends early", extended(RECIPE, "# as before\rSIZE = 2\n")),
    ("V008", "values in invisible characters", extended(RECIPE, "# as before \ufe00\ufe03\ufe01\n")),
    ("V008", "a picture that may run code", added("plots/loss.svg", b'<svg xmlns="http://www.w3.org/2000/svg"/>')),
    ("V008", "not an image", added("plots/loss.png", b"MZ")),
    ("V009", "of another record", reproduced(record_id="0" * 64)),
    ("V009", "seeds of nobody", reproduced(same_seeds=True)),
    ("V009", "a run of the record itself", reproduced(runs=(OWN_RUN,))),
    ("V009", "no numbers", reproduced(runs=again("finished", None, None))),
    ("V009", "a time below zero", reproduced(runs=again("finished", 3.2, -1.0))),
    ("V009", "a run that crashed", reproduced(runs=again("aborted", None, None))),
    ("V009", "no runs", reproduced(runs=())),
    ("V009", "one seed twice", reproduced(runs=again("finished", 3.2, 1.1) * 2)),
    ("V009", "seeds of the record, said to be new", reproduced(runs=(replace(*again("finished", 3.2, 1.1), seed=2),))),
    ("V009", "of another track", reproduced(track="main@1")),
    ("V101", "other file", made(shards=(replace(ONE, sha256=HASH), TWO))),
    ("V101", "another validation shard", logged(change(runlog.DataReady, val_shard="t_val_1.bin"),
     reading(ONE, TWO, val=replace(SCORED, name="t_val_1.bin")))),
    ("V102", "other order", made(shards=(shard("t_train_2.bin", 0, 600), shard("t_train_1.bin", 0, 400)))),
    ("V102", "went back", made(shards=(replace(ONE, stop=300), TWO, replace(ONE, start=300)))),
    ("V102", "tokens left out in the middle",
     made(shards=(replace(ONE, stop=300), shard("t_train_1.bin", 350, 650), TWO))),
    ("V102", "more shards than the track's", logged(change(runlog.DataReady, train_shards=MORE_SHARDS))),
    ("V102", "a shard listed twice", logged(change(runlog.DataReady, train_shards=[ONE.name, *MORE_SHARDS[:2]]))),
    ("V102", "a first batch of its own", in_one_run(OWN_BATCH)),
    ("V102", "the rest of a shard left out", made(shards=(replace(ONE, tokens=702), TWO))),
    ("V102", "a shard that was not in the folder", made(
        shards=(shard("t_train_2.bin", 0, 1000),),
        edit_log=change(runlog.DataReady, train_shards=["t_train_2.bin"]))),
    ("V103", "trained on it", made(shards=(ONE, shard("t_val_0.bin", 0, 400)))),
    ("V103", "listed", logged(change(runlog.DataReady, train_shards=ALL_SHARDS))),
    ("V104", "a shard again", logged(change(runlog.Step, at=8, cursor=lambda step: (0, step.cursor[1])))),
    ("V104", "a plan of less", logged(change(runlog.Plan, total_tokens=10))),
    ("V104", "count was edited", logged(change(runlog.Step, at=4, tokens_seen=501))),
    ("V102", "in another shard", logged(change(runlog.Step, at=9, cursor=lambda step: (2, step.cursor[1])))),
    ("V104", "cursor was edited", logged(change(runlog.Step, at=4, cursor=(0, 600)))),
    ("V104", "cursor beyond the cut", cutting(
        replace(ONE, stop=640, skipped=40), TWO, edit=change(runlog.Step, at=4, cursor=(0, 541)))),
    ("V104", "cut off where none is cut", logged(reading(replace(ONE, stop=640, skipped=40), TWO))),
    ("V106", "all of it cut off", cutting(ONE, TWO, replace(TWO, start=400, stop=450, skipped=50))),
    ("V104", "more read than trained on", logged(reading(ONE, replace(TWO, stop=500)))),
    ("V105", "fewer scored", logged(FEWER_SCORED)),
    ("V105", "from elsewhere", logged(reading(ONE, TWO, val=replace(SCORED, start=5, stop=1005)))),
    ("V105", "other ids in one run", in_one_run(OTHER_IDS)),
    ("V105", "a part of it cut off", logged(reading(ONE, TWO, val=replace(SCORED, skipped=999)))),
    ("V106", "beyond the end", made(shards=(replace(ONE, tokens=599), TWO))),
    ("V106", "an empty range", logged(reading(ONE, TWO, replace(TWO, start=400)))),
    ("V106", "a shard of another size in one run", in_one_run(reading(ONE, replace(TWO, tokens=5001)))),
    ("V204", "a validation behind later steps", logged(*PAUSED_EARLY)),
    ("V205", "an hour after the clock", logged(lambda log: [*log[:-3], *later(log[-3:], 3600.0)], COLD)),
    ("V206", "compiled after the clock", logged(inserted(runlog.Compile("late", 0.0), runlog.Val, -1, 500))),
    ("V206", "compiled in a pause", logged(inserted(runlog.Compile("late", 0.0), runlog.ClockResume, 1, 500))),
    ("V310", "sequences that no model gives", logged(NO_LOSSES)),
    ("V001", "a shape beyond all memory", edited(LOG, b'"out":[100000]', b'"out":[%d]' % 2**127)),
    ("V107", "overlap", made(shards=(ONE, replace(TWO, stop=200), replace(TWO, start=100, stop=300)))),
    ("V107", "a shard under two names", lambda folder: any_shards() or forge(
        folder, shards=(ONE, replace(TWO, sha256=ONE.sha256)))),
    ("V108", "a round that no island played", logged(inserted(rounds.Round(0, (), 9), runlog.ClockStart, 0, 500))),
    ("V109", "islands on another track", logged(inserted(rounds.Islands(2, 5, 2, 9.0), runlog.ClockStart, 0, 500))),
    ("V201", "stamp goes back", logged(stamped_earlier(runlog.Plan, 0.3))),
    ("V201", "stopped before its last step", logged(shorter(0.05, *TIMED[-2:]))),
    ("V201", "train time goes back",
     made(step_s=(0.1,) * 5 + (0.05,) + (0.1,) * 4, edit_log=change(runlog.Step, at=5, train_time_s=0.49))),
    ("V201", "as even as no clock", in_one_run(EVENLY)),
    ("V202", "at the end only", logged(shorter(0.5, runlog.RunEnd))),
    ("V202", "a step after its stamp",
     made(step_s=(0.1,) * 6 + (0.3,) + (0.1,) * 3, edit_log=change(runlog.Step, at=5, train_time_s=0.8))),
    ("V202", "where the clock resumes",
     made(step_s=(0.3,) * 10, edit_log=change(runlog.ClockResume, at=0, train_time_s=0.25))),
    ("V202", "half a percent of forty seconds",
     made(step_s=(4.0,) * 10, edit_log=shorter(0.0049, *TIMED))),
    ("V204", "a step after the stop", logged(moved_up(runlog.ClockStop, 0))),
    ("V204", "a pause for nothing", logged(pause_for_nothing)),
    ("V204", "for another reason", logged(change(runlog.ClockPause, reason="rest"))),
    ("V204", "at other steps", logged(change(runlog.Val, at=1, step=5))),
    ("V204", "scored twice in one pause", scored_also(scored(4, 6.0), runlog.Val, 1)),
    ("V204", "the better of two results", scored_also(scored(10, 6.0), runlog.Val, -1)),
    ("V204", "scored before the clock", scored_also(scored(0, 6.0), runlog.ClockStart)),
    ("V205", "scored in less time than it says", logged(shifted(runlog.Val, -PAUSE_S))),
    ("V205", "held-out text that took longer than its log", logged(held(seconds=900.0))),
    ("V205", "in no time", logged(change(runlog.Val, at=-1, seconds=1e-9), change(runlog.RunEnd, val_s=3 * VAL_S))),
    ("V205", "ten minutes in a pause", logged(shifted(runlog.ClockResume, 600.0), COLD)),
    ("V207", "state not rebuilt", logged(change(runlog.WarmupEnd, state_hash="d" * 16))),
    ("V207", "another warm-up", logged(inserted(runlog.WarmupEnd("d" * 16, 9, 0.1), runlog.ClockStart, 0, 500))),
    ("V207", "no warm-up that anybody saw", logged(without(runlog.WarmupStart, runlog.WarmupEnd))),
    ("V208", "two hours", logged(lambda log: [log[0], *later(log[1:], 7200.0)], COLD)),
    ("V208", "between the warm-up and the clock", logged(shifted(runlog.ClockStart, 1801.0), COLD)),
    ("V209", "faster than the bench", logged(change(runlog.Preflight, matmul_gflops=4.0))),
    ("V301", "crashed", logged(broken_off)),
    ("V302", "not below the target", made(val_losses=(5.5, 4.0, 3.4, 3.279))),
    ("V302", "too few", made(seeds=(1,))),
    ("V303", "one left out", made(seeds=(1, 2), declared=(1, 2, 3))),
    ("V303", "one added", with_runs([Spec(seed=3)])),
    ("V303", "went on after the first look", made(seeds=(1, 2, 3), promise=TWO_LOOKS, val_losses=PROVEN)),
    ("V303", "crashed when its result was known", with_runs([DISLIKED])),
    ("V303", "a result that is said to have crashed", with_runs([UNLIKED])),
    ("V303", "two crashed before a look that was never reached", with_runs(BROKE, **FAR_LOOK)),
    ("V304", "a copy with four losses edited", logged(copied_from_the_fifth_step)),
    ("V304", "same start", logged(STARTED_ALIKE)),
    ("V304", "a seed that ran twice", with_runs([TWICE])),
    ("V304", "same weights", ending(final_hash="d" * 16)),
    ("V304", "same times", logged(at_seed_1)),
    ("V305", "one stopped early", with_runs([SHORTER], seeds=(1,), declared=(1, 2))),
    ("V305", "fewer than in its config", configured({"stages": [{"num_steps": 14}]})),
    ("V305", "other than declared", made(promise=promised(num_steps=12))),
    ("V306", "declared by nothing", lambda folder: alone(folder, Spec(seed=1), Spec(seed=2))),
    ("V306", "seeds were picked", made(promise=promised(seeds_chosen=False))),
    ("V306", "another config", made(promise=promised(config_sha256=HASH))),
    ("V306", "other devices", made(promise=promised(num_devices=1))),
    ("V306", "a look at no runs", made(val_losses=PROVEN, promise=promised(looks=(Look(0, 0.0005), Look(2, 0.0005))))),
    ("V306", "three looks", made(declared=range(1, 5), promise=promised(looks=THREE_LOOKS))),
    ("V306", "two looks at the level of one", made(promise=promised(looks=(Look(1, 0.001), Look(2, 0.001))))),
    ("V306", "a seed twice", made(declared=(1, 1, 2, 2), promise=promised(looks=(Look(4, 0.001),)))),
    ("V306", "another declaration", logged(change(runlog.RunStart, batch_sha256=HASH))),
    ("V306", "declared not to count", made(promise=promised(purpose="unranked"))),
    ("V306", "a worse seed left out", redeclared),
    ("V307", "no noise", made(seeds=(1, 2, 3, 4))),
    ("V309", "below the entropy rate", made(val_losses=(5.5, 4.0, 3.4, 2.9))),
    ("V309", "a loss below zero", logged(change(runlog.Step, at=4, loss=-0.5))),
    ("V309", "a validation beyond all models", made(val_losses=(5e5, 4.0, 3.4, 3.25))),
    ("V309", "blew up", in_one_run(BLEW_UP)),
    ("V309", "blew up, and says that it crashed", in_one_run(said_to_have_broken_off)),
    ("V310", "sequences of no equal length", logged(change(runlog.Val, sequences=lambda val: (val.loss,) * 3))),
    ("V310", "loss was edited", logged(*LOSS_31)),
    ("V310", "end was edited", logged(change(runlog.RunEnd, val_loss=3.1))),
    ("V310", "sequences of another mean", logged(change(runlog.Val, sequences=(3.0, 3.1)))),
    ("V310", "no result at its end", ending(val_loss=None)),
    ("V210", "of no time", resumed(EARLIER)),
    ("V210", "of no time, by both", resumed(EARLIER, change(runlog.Step, train_time_s=0.01))),
    ("V210", "of fewer tokens", resumed(left=change(runlog.Step, at=3, tokens_seen=300))),
    ("V210", "another state", resumed(change(runlog.Resume, state_hash="f" * 16))),
    ("V210", "of another step", resumed(left=lambda log: log[: place_of(log, runlog.Step, 3)])),
    ("V210", "itself", resumed(change(runlog.Resume, run_id="tiny-1-00a1"))),
    ("V210", "a run of another seed", resumed(change(runlog.Resume, run_id="tiny-2-00a2"))),
    ("V210", "nobody, before it crashed",
     with_runs([Spec(seed=3, attempt="b", edit_log=lambda log: went_on(log)[:-6])])),
    ("V210", "given weights that begin later in the data",
     made(shards=(shard("t_train_1.bin", 100, 600), shard("t_train_2.bin", 0, 500)),
          edit_log=inserted(runlog.Resume("given", 0, "e" * 16, 0.0, 0, (0, 100)), runlog.ClockStart, 0, 500))),
    ("V210", "a log that is not here", logged(went_on)),
    ("V311", "goes on from another run", resumed()),
    ("V311", "begins with weights from elsewhere",
     logged(inserted(runlog.Resume("given", 0, "e" * 16, 0.0, 0, (0, 0)), runlog.ClockStart, 0, 500))),
    ("V313", "started with --unranked", logged(change(runlog.RunStart, purpose="unranked"))),
    ("V313", "a run of a sweep", logged(change(runlog.RunStart, purpose="sweep"))),
    ("V312", "the state of an older run", beside(
        seeds=(9, 10), edit_log=change(runlog.RunEnd, final_hash=state("end", Spec(seed=2))))),
    ("V312", "the times of an older run", beside(seeds=(9, 10), edit_log=at_seed_1)),
    ("V312", "a run under another name", beside(attempt="z")),
    ("V312", "a seed that was run again",
     beside(attempt="y", step_s=(0.2,) * 10, edit_log=OTHER_LOSSES)),
    ("V105", "no held-out text", logged(without(runlog.HeldOut))),
    ("V105", "less held-out text", logged(held(tokens=500, nll_sum=(3.25 * 500).hex()))),
    ("V105", "held-out text of another step", logged(held(step=8))),
    ("V105", "held-out text of no track", lambda folder: edit_track("held_tokens = 1000", "") or forge(folder)),
    ("V204", "held-out text before the result", logged(lambda log: [*log[:-3], *swapped(log[-3:-1]), log[-1]])),
    ("V204", "held-out text in a pause", in_one_run(both(
        without(runlog.HeldOut), inserted(runlog.HeldOut("0" * 16, scored(10)), runlog.ClockResume, 2, 500)))),
    ("V204", "scored again when the held-out text was known", scored_also(scored(10), runlog.RunEnd)),
    ("V205", "held-out text in no time", logged(held(seconds=1e-9))),
    ("V310", "held-out text of another loss than its sum", logged(held(loss=3.1))),
    ("V310", "held-out sequences of another mean", logged(held_out(3.25), held(sequences=(3.0, 3.1)))),
    ("V310", "fewer held-out sequences, that hide a gap", logged(held_out(3.25), held(sequences=(3.25,)))),
    ("V001", "a space in an event of held-out text", edited(LOG, b'"nonce":"', b'"nonce": "')),
    ("V314", "known by heart", logged(held_out(loss=3.6))),
    ("V404", "one device", logged(change(runlog.Preflight, num_devices=1))),
    ("V404", "other platform", logged(change(runlog.Preflight, platform="gpu"))),
    ("V404", "another kind of device in one run", in_one_run(change(runlog.Preflight, device_kind="gpu"))),
    ("V404", "fewer devices in its config",
     made(edit_log=other_config({**CONFIG, "num_devices": 4}), promise=promised(num_devices=4))),
    ("V308", "far ahead in the middle", made(val_losses=(5.5, 3.5, 3.4, 3.25))),
    ("V401", "behind a good one", in_environment(XLA_FLAGS="--xla_gpu_enable_pdl=1 --xla_cpu_enable_fast_math")),
    ("V401", "in the program", logged(change(runlog.Plan, compiler_options={"xla_cpu_enable_fast_math": True}))),
    ("V401", "more than 16 bits", logged(change(runlog.Plan, compiler_options={"xla_allow_excess_precision": True}))),
    ("V401", "in a file", in_environment(XLA_FLAGS="/tmp/flags.txt")),
    ("V402", "foreign code", in_environment(LD_PRELOAD="faster.so")),
    ("V402", "products in TF32", in_environment(NVIDIA_TF32_OVERRIDE="1")),
    ("V402", "a variable that nobody knows", in_environment(NCCL_TOPO_FILE="rings.xml")),
    ("V402", "a setting of JAX", logged(change(runlog.Exported, settings={"jax_softmax_custom_jvp": "True"}))),
    ("V403", "another lock", preflight(lock_sha256=HASH)),
    ("V403", "a lock that pins no JAX", preflight(lock=OTHER_LOCK, lock_sha256=sha256(OTHER_RAW))),
    ("V403", "a lock from elsewhere", preflight(lock="../run.lock")),
    ("V403", "not what is locked", preflight(software={**SOFTWARE, "jax": "0.9"})),
    ("V403", "no compiler", preflight(software={**SOFTWARE, "jaxlib": ""})),
    ("V405", "too hot", logged(change(runlog.RunEnd, throttled_s=1.5))),
    ("V405", "nobody looked", logged(change(runlog.RunEnd, throttled_s=None))),
    ("V406", "part of a commit", preflight(commit="0123456789ab")),
    ("V406", "a commit of letters", preflight(commit="deadbeef" * 5)),
    ("V406", "a commit of one digit", preflight(commit="0" * 40)),
    ("V406", "not committed", preflight(dirty=True)),
    ("V406", "nobody knows", preflight(dirty=None)),
    ("V406", "a commit with another recipe", made(
        edit_source=with_file(RECIPE, "SIZE = 2\n"), edit_log=change(runlog.Preflight, commit=commit_of(dict)))),
    ("V407", "a node that became slow", ending(matmul_gflops=20.0)),
    ("V407", "a second benchmark beyond all devices", ending(matmul_gflops=1e12)),
    ("V407", "faster than can be bought", on_device("NVIDIA H200", 1e8)),
    ("V407", "a tired device", on_device("NVIDIA H200", 1e6)),
    ("V407", "a device of nobody that is too good", on_device("Wunderkind 9000", 1e12)),
    ("V501", "no Python", science("SIZE = = 1\n")),
    ("V501", "another encoding", science("# coding: utf-7\nSIZE = 1\n")),
    ("V501", "no recipe", sourced(RECIPE, lambda _: None)),
    ("V501", "a name that is not there", science("from speedrun.science.models import record22\n")),
    ("V501", "a relative import", science("from .hidden import SIZE\n")),
    ("V501", "names that are not listed", science("from speedrun.science.nn import *\n")),
    ("V501", "an import that runs late", science("def size():\n    import speedrun.science.gone as gone\n")),
    ("V501", "two files for one module", extended("speedrun/recipes/tiny/__init__.py", "SIZE = 2\n")),
    ("V501", "a file of data", extended(RECIPE, f"# {'1' * 2**18}\n")),
    ("V501", "easier rules", sourced("speedrun/tracks/forged.toml", lambda text: text.replace("3.28", "3.38"))),
    ("V503", "another clock", extended("speedrun/base/clock.py", "# slower\n")),
    ("V503", "another finder of recipes", extended("speedrun/recipes/__init__.py", "# mine\n")),
    ("V503", "data beside the recipe", extended("speedrun/recipes/tiny.toml", "size = 1\n")),
    ("V503", "shadows a package", extended("numpy.py", "float32 = 1\n")),
    ("V505", "a table beside the parameters", logged(change(runlog.Plan, state_bytes_per_device=2**22))),
    ("V505", "a replica that nobody asked for", logged(change(runlog.Preflight, num_replicas=2))),
    ("V506", "fewer are told", logged(change(runlog.Plan, num_params=1_100_000))),
    ("V506", "more than the track permits", capped(999_999)),
    ("V506", "another model in one run", in_one_run(change(runlog.Plan, shapes={"table": (1000, 1000)}))),
    ("V506", "arithmetic of nothing", logged(change(runlog.Plan, shapes=MATRICES, flops_per_token=1.0))),
    ("V506", "do not fit into the state", logged(change(runlog.Plan, state_bytes_per_device=1000))),
    ("V506", "more arithmetic than numbers", logged(change(runlog.Plan, flops_per_token=7e6))),
    ("V507", "a setting more", fixed(rules=("lr = 0.02", ""))),
    ("V507", "another loss", fixed(other_config({**CONFIG, "recipe": {**CONFIG["recipe"], "loss": {"z": 1}}}))),
    ("V507", "a setting less", fixed(rules=("lr = 0.02", "lr = 0.02\nheads = 2"))),
    ("V507", "a longer window", fixed(change(runlog.Step, at=5, inputs={"window_blocks": 3}))),
    ("V507", "another norm", fixed(edit_source=with_file("speedrun/science/nn.py", "rms_norm = abs\n"))),
]  # fmt: skip
