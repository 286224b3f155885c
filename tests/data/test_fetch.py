"""Downloads shards with the real client from a local hub that breaks connections and sends wrong bytes."""

import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from hub_server import COMMIT, FakeHub, serve
from huggingface_hub import constants
from huggingface_hub.utils import close_session, httpx
from typed import invoke

from speedrun.base import track
from speedrun.base.errors import DataError
from speedrun.data import fetch, hub, shards
from speedrun.data.overview import verify
from speedrun.data.shards import HEADER_BYTES, MANIFEST, read_manifest, sha256, write_shard
from speedrun.data.stream import Shape, require_steps
from speedrun.recipes import load as load_recipe

REPO = "someone/tokens"
VAL = "t_val_000000.bin"
NAMES = [VAL, *(f"t_train_{i:06d}.bin" for i in (1, 2, 3))]
DATA = track.Data("t", "t_train_*.bin", "t_val_*.bin", 1000, 50257, 50256, "get it!")
SOURCE = track.Hub(repo=REPO, revision="main", train_shards=2)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    folder, made = tmp_path_factory.mktemp("hub"), {}
    for i, name in enumerate(NAMES):
        ids = np.random.default_rng(i).integers(0, 50256, 100_000)
        ids[[0, 10, 11, 5000, 70_000, 70_001, 99_999]] = 50256
        made[name] = write_shard(folder / name, ids).path.read_bytes()
    return made | {"README.md": b"about", "sub/t_train_000000.bin": b"no shard of ours"}


@pytest.fixture
def server(files: dict[str, bytes], monkeypatch) -> Iterator[FakeHub]:
    """A hub that this process uses, with small pieces and short pauses."""
    pause = time.sleep
    monkeypatch.setattr(time, "sleep", lambda s: pause(min(s, 0.01)))
    monkeypatch.setattr(hub, "PAUSES_S", (0.01, 0.01, 0.01))
    monkeypatch.setattr(hub, "_TIMEOUT_S", 600)  # a busy machine is no fault of the hub
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**14)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 600)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    before = threading.enumerate()
    with serve(REPO, dict(files)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server
        server.over.set()
        for thread in {*threading.enumerate()} - {*before}:
            if "(worker)" in thread.name:  # a failed download has left it
                thread.join()


def get(folder: Path, source: track.Hub = SOURCE, data: track.Data = DATA, **progress: Any) -> Any:
    shown: Any = Mock(**progress)
    fetch.fetch(folder, data, source, shown.update, shown.say)
    return shown


def assert_sound(folder: Path, files: dict[str, bytes], num_train: int = 2):
    names = NAMES[: num_train + 1]
    assert sorted(path.name for path in folder.iterdir()) == sorted([MANIFEST, *names])
    assert all((folder / name).read_bytes() == files[name] for name in names)
    manifest = read_manifest(folder)
    assert manifest is not None
    assert (manifest.source, manifest.settings) == (REPO, {"revision": COMMIT})
    assert {(entry.tokens, entry.documents) for entry in manifest.shards.values()} == {(100_000, 7)}
    assert [*manifest.shards] == sorted(names)
    verify(folder, DATA, full=True)


def assert_whole_in_order(folder: Path, files: dict[str, bytes]):
    here = [name for name in NAMES if (folder / name).exists()]
    assert here == NAMES[: len(here)]
    assert all((folder / name).read_bytes() == files[name] for name in here)


def test_each_shard_is_downloaded_once(tmp_path, server):
    progress = get(tmp_path / "new")
    assert_sound(tmp_path / "new", server.files)
    assert sorted(server.gets) == sorted((name, 0) for name in NAMES[:3])
    assert progress.update.call_args.args == (total := 3 * len(server.files[VAL]), total)
    server.shutdown()  # a complete folder needs no network
    get(tmp_path / "new")
    get(tmp_path / "new", msgspec.structs.replace(SOURCE, train_shards=1))


FAULTS = {
    "cut at 60 %": ["cut"],
    "a stretch twice": ["repeat"],
    "200 to a Range": ["cut", "ignore range"],
    "all of it": ["429", "500", "cut", "ignore range and cut", "stall", "flip"],
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_temporary_faults(tmp_path, server, faults, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    server.faults = {name: list(faults) for name in NAMES[:3]}
    get(tmp_path)
    assert not any(server.faults.values()), "all happened"
    assert_sound(tmp_path, server.files)
    if faults == ["cut"]:
        resumed = [start for _, start in server.gets if start > 0.5 * len(server.files[VAL])]
        assert len(resumed) == 3


@pytest.mark.parametrize(
    ("fault", "cause", "gets"),
    [
        ("500", "the hub answers 500", {0}),
        ("flip", "sha256 is [0-9a-f]{64}; the hub says [0-9a-f]{64}; deleted; try again later", {4}),
        # Of four attempts that resume once, one may break before its first byte on a busy machine.
        ("ignore range and cut", "a broken transfer cannot be resumed", {4 * 2 - 1, 4 * 2}),
    ],
)
def test_permanent_faults(tmp_path, server, fault, cause, gets):
    bad = NAMES[1]
    server.always = {bad: fault}
    torn = tmp_path / fetch.STAGING / "x.incomplete"
    torn.parent.mkdir()
    torn.touch()
    with pytest.raises(DataError, match=cause) as caught:
        get(tmp_path)
    assert "\n" not in str(caught.value)
    assert not torn.exists(), "a killed process left it"
    assert (tmp_path / VAL).exists()
    assert not (tmp_path / bad).exists()
    assert not (tmp_path / NAMES[2]).exists(), "it comes after the missing one"
    assert not list(tmp_path.rglob(f"*/{bad}")), "wrong bytes are deleted"
    assert_whole_in_order(tmp_path, server.files)
    assert [name for name, _ in server.gets].count(bad) in gets
    server.always = {}
    get(tmp_path)
    assert_sound(tmp_path, server.files)


def test_a_listing_that_fails(tmp_path, server, monkeypatch):
    for faults, timeout_s in (["500"] * 3, 600), (["stall"], 0.1):
        monkeypatch.setattr(hub, "_TIMEOUT_S", timeout_s)
        server.faults = {"the listing": list(faults)}
        hub.dataset_info(REPO, "main")
        assert not any(server.faults.values()), "it is asked again"
        server.always = {"the listing": faults[0]}
        with pytest.raises(DataError, match=r"the hub answers 500|no connection"):
            get(tmp_path)
        server.always = {}
    for page in ("<html>Log in</html>", "[]"):  # of a network that wants a login
        server.always = {"the listing": page}
        with pytest.raises(DataError, match="the answer is not that of a hub"):
            get(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("ALL_PROXY", "socks5://127.0.0.1:9"), ("SSL_CERT_FILE", "/missing"), ("HF_TOKEN", "hf_stale")],
)
def test_a_variable_that_breaks_the_client_is_named_with_its_cure(tmp_path, server, monkeypatch, name, value):
    server.always = {"the listing": "401"} if name == "HF_TOKEN" else {}
    close_session()
    monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match=rf"mend or unset .*{name}|{name}: unset it") as caught:
        get(tmp_path)
    assert "\n" not in str(caught.value)
    if name != "HF_TOKEN":
        with pytest.raises(hub.HubError, match=f"unset .*{name}"):
            hub.reach(1.0)


def test_a_session_that_another_transfer_closes(tmp_path, server, monkeypatch):
    """The client closes it whenever one of its threads cannot connect."""
    honest, closed = httpx.Client.request, threading.Event()

    def request(client: httpx.Client, *args: Any, **named: Any) -> httpx.Response:
        if threading.current_thread() is not threading.main_thread() and not closed.is_set():
            closed.set()
            close_session()
        return honest(client, *args, **named)

    monkeypatch.setattr(httpx.Client, "request", request)
    get(tmp_path)
    assert closed.is_set()
    assert_sound(tmp_path, server.files)


def test_the_hub_lacks_shards_or_the_repository(tmp_path, server):
    with pytest.raises(DataError, match=f"at {COMMIT} it has 3 and 1; need 4 and 1"):
        get(tmp_path, msgspec.structs.replace(SOURCE, train_shards=4))
    with pytest.raises(DataError, match="the hub answers 404"):
        get(tmp_path, msgspec.structs.replace(SOURCE, repo="nobody/tokens"))
    assert list(tmp_path.iterdir()) == []


def test_later_downloads_use_the_first_commit(tmp_path, server):
    get(tmp_path, msgspec.structs.replace(SOURCE, train_shards=1))
    one_more = msgspec.structs.replace(SOURCE, train_shards=2)
    pinned = msgspec.structs.replace(one_more, revision="f" * 40)
    with pytest.raises(DataError, match=f"shards of {REPO}@{COMMIT}; need those of {REPO}@{'f' * 40}"):
        get(tmp_path, pinned)
    server.commit = "e" * 40  # "main" moved, and the old commit was deleted
    with pytest.raises(DataError, match="the hub answers 404"):
        get(tmp_path, one_more)
    server.commit = COMMIT
    get(tmp_path, one_more)
    with pytest.raises(DataError, match=rf"shards of {REPO}@{COMMIT}; need those of a/b@.*; choose another"):
        get(tmp_path, msgspec.structs.replace(SOURCE, repo="a/b"))


def test_a_lost_shard_must_be_the_same_again(tmp_path, server):
    get(tmp_path)
    (tmp_path / NAMES[1]).unlink()
    sound = server.files[NAMES[1]]
    server.files[NAMES[1]] = sound[:-2] + b"\0\0"  # the hub's own digest agrees with it
    with pytest.raises(DataError, match=rf"{MANIFEST} says [0-9a-f]{{64}}"):
        get(tmp_path)
    assert not (tmp_path / NAMES[1]).exists()
    server.files[NAMES[1]] = sound
    get(tmp_path, msgspec.structs.replace(SOURCE, train_shards=1))  # restored also if fewer are asked for
    assert_sound(tmp_path, server.files)


def test_digests_of_the_track_and_ids_are_checked(tmp_path, server):
    data = msgspec.structs.replace(DATA, sha256={VAL: "0" * 64})
    with pytest.raises(DataError, match=f"the track says {'0' * 64}"):
        get(tmp_path, data=data)
    server.files[VAL] = server.files[VAL][:HEADER_BYTES] + b"\xff\xff" * 100_000
    with pytest.raises(DataError, match="token 0 is id 65535"):  # even with a correct digest
        get(tmp_path)


def test_existing_shards_are_kept_if_the_digest_is_the_hubs(tmp_path, server):
    for name in (NAMES[1], NAMES[3]):  # copied there by the user
        (tmp_path / name).write_bytes(server.files[name])
    get(tmp_path)
    assert_sound(tmp_path, server.files, 3)
    assert sorted(name for name, _ in server.gets) == [NAMES[2], VAL]
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    write_shard(tmp_path / NAMES[2], np.arange(100_000) % 50257)
    with pytest.raises(DataError, match=rf"{NAMES[2]}: sha256 is .* the hub says .*; delete it"):
        get(tmp_path)
    assert (tmp_path / NAMES[2]).exists(), "only the user may delete it"


def test_shards_that_the_user_adds_later(tmp_path, server):
    get(tmp_path)
    (tmp_path / NAMES[3]).write_bytes(server.files[NAMES[3]])
    with pytest.raises(DataError, match=f"{MANIFEST} says nothing: {DATA.get}"):
        shards.open_track(tmp_path, DATA)
    get(tmp_path)  # as the message advises
    assert_sound(tmp_path, server.files, 3)
    (tmp_path / NAMES[2]).unlink()
    (tmp_path / MANIFEST).unlink()
    get(tmp_path, msgspec.structs.replace(SOURCE, train_shards=1))
    assert_sound(tmp_path, server.files, 3)  # no gap: it would be another order of tokens
    (tmp_path / "t_train_other.bin").write_bytes(server.files[NAMES[3]])
    with pytest.raises(DataError, match=rf"t_train_other\.bin: not a shard of {REPO}; .* remove it"):
        get(tmp_path)


def test_two_downloads_into_one_folder_take_turns(tmp_path, server):
    server.faults = {VAL: ["hold"]}
    lines, waits = list[str](), threading.Event()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(get, tmp_path)
        server.await_stall(lambda: first.result() if first.done() else None)
        second = threads.submit(get, tmp_path, say=lambda line: (lines.append(line), waits.set()))
        while not waits.wait(0.01) and not second.done():
            pass
        server.over.set()
        first.result()
        second.result()
    assert "another program writes into it" in lines[0]
    assert_sound(tmp_path, server.files)
    assert sorted(server.gets) == sorted((name, 0) for name in NAMES[:3]), "the second downloads nothing"


ARGS = ("data", "get", "--track", "webmini", "--repo", REPO, "--shards", "2")


@pytest.fixture
def big(server, tmp_path) -> FakeHub:
    for i, name in enumerate(NAMES):
        ids = np.random.default_rng(9 + i).integers(0, 50256, 270_000)
        ids[0] = 50256
        server.files[name] = write_shard(tmp_path / "x.bin", ids).path.read_bytes()
    return server


@contextmanager
def stalling(out: Path, big: FakeHub, name: str) -> Iterator[subprocess.Popen[str]]:
    """The command in a process that waits for the rest of a shard; those before it are whole."""
    big.always = {name: "stall"}
    argv = [sys.executable, "-m", "speedrun", *ARGS, "--out", str(out)]
    env = os.environ | {"HF_HUB_DOWNLOAD_TIMEOUT": "600"}
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=env)
    with process:
        wait = lambda: process.communicate() if process.poll() is not None else None  # noqa: E731
        big.await_stall(wait)
        while not (out / NAMES[NAMES.index(name) - 1]).exists():
            assert wait() is None
            time.sleep(0.01)
        yield process


def test_the_command(tmp_path, big, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    done = invoke(*ARGS, "--out", str(tmp_path / "d"), "--json")
    assert done.exit_code == 0, done.output
    result = msgspec.json.decode(done.stdout)
    assert result["track"] == "webmini@2"
    assert result["manifest"]["settings"] == {"revision": COMMIT}
    digests = {name: entry["sha256"] for name, entry in result["manifest"]["shards"].items()}
    assert digests == {name: sha256(tmp_path / "d" / name) for name in NAMES[:3]}
    assert big.tokens == {"Bearer hf_secretsecret"}
    assert "hf_secret" not in done.output


def test_killed_and_started_again(tmp_path, big):
    folder = tmp_path / "d"
    with stalling(folder, big, NAMES[2]) as process:
        process.kill()
    assert [name for name in NAMES if (folder / name).exists()] == NAMES[:2]
    assert_whole_in_order(folder, big.files)
    assert list(folder.rglob("*.incomplete"))
    big.always, big.gets[:] = {}, []
    again = invoke(*ARGS, "--out", str(folder))
    assert again.exit_code == 0, again.output
    assert big.gets == [(NAMES[2], 0)], "finished shards are not downloaded again"
    assert sorted(p.name for p in folder.iterdir()) == sorted([MANIFEST, *NAMES[:3]])
    verify(folder, track.load("webmini").data, full=True)


def test_stopped(tmp_path, big):
    """It waits for no thread: the transfer stalls until the end of the test."""
    with stalling(tmp_path, big, NAMES[1]) as process:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == 75
    assert "are whole; run the same command again to continue" in err
    assert "Traceback" not in err
    assert_whole_in_order(tmp_path, big.files)


@pytest.mark.parametrize(("is_offline", "why"), [(True, "HF_HUB_OFFLINE is set"), (False, "no connection (")])
def test_without_a_network(tmp_path, is_offline, why, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    done = invoke(*ARGS, "--out", str(tmp_path))
    assert done.exit_code == 3
    assert done.stderr.count("\n") == 1
    assert why in done.stderr
    assert f"copy shards into {tmp_path}, or make them with data/fineweb_prep.py" in done.stderr


@pytest.mark.parametrize("name", [n for n in track.files() if track.load(n).data.hub])
def test_the_default_is_enough_for_the_recipe(tmp_path, name):
    rules = track.load(name)
    assert rules.data.hub is not None
    full = write_shard(tmp_path / "x.bin", np.zeros(1, int))
    full = dataclasses.replace(full, num_tokens=100_000_000)
    recipe = load_recipe(rules.recipe)
    steps = [Shape(1, stage.batch_tokens) for stage in recipe.stages for _ in range(stage.num_steps)]
    require_steps([full] * rules.data.hub.train_shards, steps)
    assert rules.data.get == f"speedrun data get --track {name}"
    assert shards.data_folder(rules, None).name == "fineweb10B"


def test_a_hub_that_never_answers_is_not_waited_for(monkeypatch, tmp_path):
    """The client has no limit of its own for the listing of a model."""
    monkeypatch.setattr(hub, "_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(hub.HubError):
            hub.model_folder("nobody/none", ["config.json"])


@pytest.mark.parametrize("address", ["hf-mirror.com", "http://[bad"])
def test_an_address_that_is_none_is_named_at_once(address, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(hub.HubError, match=re.escape(repr(address))) as caught:
        hub.dataset_info("nobody/none", None)
    assert not caught.value.may_pass
