"""The file format, and the folder of a track: round trips, and errors that name what is broken."""

import os
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedrun.base import track
from speedrun.base.errors import DataError, StorageError
from speedrun.data import shards
from speedrun.data.overview import verify
from speedrun.data.shards import Manifest, ShardEntry, open_shard, open_track, write_shard

VOCAB_SIZE = 50257


def header(magic: int = shards.MAGIC, version: int = 1, count: int = 4) -> bytes:
    words = np.zeros(256, "<i4")
    words[:3] = magic, version, count
    return words.tobytes()


BODY = np.arange(4, dtype="<u2").tobytes()
BAD_FILES = {
    "wrong magic": (header(magic=7) + BODY, "starts with 7"),
    "version 2": (header(version=2) + BODY, "version 2"),
    "no tokens": (header(count=0), "promises 0 tokens"),
    "too short": (header(count=5) + BODY, "1,032 bytes"),
    "too long": (header(count=3) + BODY, "1,032 bytes"),
    "half a header": (header()[:500], "500 bytes"),
    "empty": (b"", "0 bytes"),
}


@pytest.mark.parametrize(("content", "cause"), BAD_FILES.values(), ids=BAD_FILES)
def test_damaged_and_foreign_files_are_refused(tmp_path, content, cause):
    path = tmp_path / "x_train_000001.bin"
    path.write_bytes(content)
    assert_refused(path, cause)


def test_what_is_no_file_is_refused(tmp_path):
    """To open a pipe would wait for ever."""
    os.mkfifo(pipe := tmp_path / "pipe.bin")
    for path in (pipe, tmp_path):
        assert_refused(path, "not a regular file")
    assert_refused(tmp_path / "missing.bin", "No such file")


def assert_refused(path: Path, cause: str):
    with pytest.raises(DataError, match=re.escape(cause)) as caught:
        open_shard(path, vocab_size=VOCAB_SIZE)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert message.count(";") == 2, "what we got; what is needed; what to do"


@given(st.lists(st.integers(0, 65535), min_size=1, max_size=50), st.data())
def test_a_written_shard_is_read_back(tmp_path_factory, ids, data):
    path = tmp_path_factory.mktemp("shard") / "x.bin"
    shard = write_shard(path, np.array(ids))
    start = data.draw(st.integers(0, len(ids)))
    stop = data.draw(st.integers(start, len(ids)))
    assert shard.num_tokens == len(ids)
    assert shard.read(start, stop).tolist() == ids[start:stop]
    assert shard.read(start, stop).dtype == np.uint16
    assert path.read_bytes() == header(count=len(ids)) + np.array(ids, "<u2").tobytes()


@pytest.mark.parametrize("tokens", [[], [-1], [65536], [0.5], [[1, 2]]], ids=str)
def test_impossible_tokens_are_not_written_nor_any_into_no_folder(tmp_path, tokens):
    with pytest.raises(DataError):
        write_shard(tmp_path / "x.bin", np.array(tokens))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match="cannot be written: No such file"):
        write_shard(tmp_path / "missing" / "x.bin", np.array([1]))


def test_ids_outside_the_vocabulary_are_refused(tmp_path):
    path = tmp_path / "x.bin"
    write_shard(path, np.array([1, 2, VOCAB_SIZE - 1, 60000, 3]))
    shard = open_shard(path, vocab_size=VOCAB_SIZE)
    assert shard.read(0, 3).tolist() == [1, 2, VOCAB_SIZE - 1]
    with pytest.raises(DataError, match=r"x\.bin: token 3 is id 60000; .* below 50,257"):
        shard.read(1, 5)


@pytest.mark.parametrize(
    ("accident", "cause"),
    [
        (lambda path: os.truncate(path, shards.HEADER_BYTES + 6), "changed"),
        (lambda path: write_shard(path, np.arange(100) + 1), "changed"),
        (Path.unlink, "No such"),
    ],
)
def test_a_shard_that_changes_during_a_run_is_an_error(tmp_path, accident, cause):
    shard = write_shard(tmp_path / "x.bin", np.arange(100))
    accident(shard.path)
    with pytest.raises(DataError, match=cause):
        shard.read(0, 2)


TRAIN, VAL = "t_train_1.bin", "t_val_0.bin"
DATA = track.Data("t", "t_train_*.bin", "t_val_*.bin", 9, 10, 0, "get it!")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ids = np.arange(10)
    for name in (TRAIN, "t_train_2.bin", VAL):
        write_shard(tmp_path / name, ids)
    entry = ShardEntry(10, 1, shards.sha256(tmp_path / VAL))
    names = [TRAIN, "t_train_2.bin", VAL]
    shards.write_manifest(tmp_path, Manifest("a test", {"seed": 1}, 10, 0, dict.fromkeys(names, entry)))
    return tmp_path


def listed(folder: Path, *names: str) -> track.Data:
    return msgspec.structs.replace(DATA, sha256={name: shards.sha256(folder / name) for name in names})


def test_a_valid_folder_passes(folder):
    train, val = open_track(folder, DATA)
    assert [s.path.name for s in (*train, *val)] == [TRAIN, "t_train_2.bin", VAL]
    assert [v.sha256 for v in verify(folder, DATA, full=False)] == [None] * 3
    full = verify(folder, listed(folder, TRAIN, "t_train_2.bin", VAL), full=True)
    assert [v.sha256 for v in full] == [shards.sha256(folder / v.name) for v in full]
    assert shards.read_manifest(folder.parent) is None


def overwrite(name: str, *ids: int):
    return lambda folder: write_shard(folder / name, np.array(ids))


def edit_manifest(old: str, new: str):
    def edit(folder: Path):
        path = folder / shards.MANIFEST
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return edit


def same_file(folder: Path):
    (folder / VAL).unlink()
    os.link(folder / TRAIN, folder / VAL)


FAST_FAULTS = {
    "validation too short": (overwrite(VAL, *range(9)), "9 tokens; validation needs 10: get it!"),
    "no validation": (lambda f: (f / VAL).unlink(), r"the track needs t_val_\*\.bin"),
    "no training": (
        lambda f: [(f / n).unlink() for n in (TRAIN, "t_train_2.bin")],
        r"the track needs t_train_\*\.bin",
    ),
    "trained and scored": (same_file, "also a validation shard"),
    "not in the manifest": (overwrite("t_train_3.bin", 0), "manifest.json says nothing"),
    "other count": (overwrite(TRAIN, 0, 1), "2 tokens; manifest.json says 10"),
    "other vocabulary": (edit_manifest('"vocab_size": 10', '"vocab_size": 11'), r"\(11, 0\); need \(10, 0\)"),
    "not in the folder": (
        lambda f: (f / "t_train_2.bin").unlink(),
        r"t_train_2\.bin is missing, which manifest\.json names; .* get it!",
    ),
    "a manifest that is no text": (
        lambda f: (f / "manifest.json").write_bytes(b'{"source": "\xff"}'),
        "utf-8",
    ),
    "no manifest": (edit_manifest('"source"', '"sauce"'), "need a valid manifest"),
}
FULL_FAULTS = {
    "other bytes": (overwrite("t_train_2.bin", *range(9, -1, -1)), "sha256 is"),
    "foreign id": (overwrite(TRAIN, 0, *[10] * 9), "token 1 is id 10"),
    "no document token": (overwrite(VAL, *range(9, -1, -1)), "begins with id 9; need 0"),
    "documents": (edit_manifest('"documents": 1', '"documents": 2'), "1 documents; manifest.json says 2"),
}


@pytest.mark.parametrize("name", [*FAST_FAULTS, *FULL_FAULTS])
def test_faults_of_a_folder(folder, name):
    fault, cause = (FAST_FAULTS | FULL_FAULTS)[name]
    fault(folder)
    if full := name in FULL_FAULTS:  # found only by reading tokens
        verify(folder, DATA, full=False)
    with pytest.raises(DataError, match=cause):
        verify(folder, DATA, full=full)


def test_shards_must_be_the_first_of_the_tracks_list(folder):
    (folder / shards.MANIFEST).unlink()
    data = listed(folder, TRAIN, "t_train_2.bin", VAL)
    (folder / "t_train_2.bin").unlink()
    open_track(folder, data)  # the first of the list
    write_shard(folder / "t_train_3.bin", np.arange(10))
    assert [shard.path.name for shard in open_track(folder, data).train] == [TRAIN], "the third is unknown"
    write_shard(folder / "t_train_0.bin", np.arange(10))
    with pytest.raises(DataError, match=r"t_train_0\.bin is not the track's"):
        open_track(folder, data)
    (folder / "t_train_0.bin").unlink()
    (folder / TRAIN).rename(folder / "t_train_2.bin")
    with pytest.raises(DataError, match=r"t_train_1\.bin is missing"):
        open_track(folder, data)
