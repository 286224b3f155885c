"""Shards from text: against a definition of ten lines, against tiktoken on real rows, and after kills."""

import gzip
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typed import invoke

from speedrun.base import atomic_files, track
from speedrun.base.atomic_files import LOCK, lock_folder
from speedrun.base.clock import Stopwatch
from speedrun.base.errors import DataError, UsageError
from speedrun.data import documents, overview, shards, tokenizer
from speedrun.data.documents import Dataset, open_source
from speedrun.data.overview import verify
from speedrun.data.prepare import Cut, prepare
from speedrun.data.shards import Position

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
RANKS = SHARED / "gpt2-bpe" / "r50k_base.tiktoken"
HEAD = SHARED / "text" / "fineweb_head.jsonl.gz"

needs_shared = pytest.mark.skipif(not RANKS.exists(), reason="needs ../shared/data: real rows, GPT-2's ranks")

BYTES = tokenizer.load("bytes")
DOCUMENT = 256


def definition(texts: Sequence[str], shard_tokens: int, limit: int | None = None) -> list[list[int]]:
    """The definition: a document token before each text, then a split every `shard_tokens`."""
    ids: list[int] = []
    for text in texts:
        # Joins surrogate pairs and replaces lone surrogates.
        ids += [DOCUMENT, *text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()]
    ids = ids[:limit]
    return [ids[at : at + shard_tokens] for at in range(0, len(ids), shard_tokens)]


def write_rows(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def command(rows: Path, out: Path, options: str) -> list[str]:
    argv = f"-m speedrun data prep --source {rows} --tokenizer bytes --out {out} {options}"
    return [sys.executable, *argv.split()]


def shards_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.bin"))}


def ids_of(folder: Path, prefix: str = "fineweb") -> list[list[int]]:
    paths = [*sorted(folder.glob(f"{prefix}_val_*.bin")), *sorted(folder.glob(f"{prefix}_train_*.bin"))]
    return [np.fromfile(path, "<u2", offset=1024).tolist() for path in paths]


TEXTS = st.lists(
    st.text(st.characters(codec=None, categories=("L", "Cs", "Zs", "Nd", "So")), max_size=12),
    min_size=1,
    max_size=12,
)


class Killed(Exception):
    pass


def kill_after(num_blocks: int) -> Callable[..., None]:
    left = itertools.count(num_blocks - 1, -1)

    def report(*_: object) -> None:
        if next(left) == 0:
            raise Killed

    return report


LIVES = st.lists(st.integers(1, 4), max_size=4)


@settings(max_examples=60)
@given(TEXTS, st.integers(1, 30), st.none() | st.integers(1, 60), st.integers(1, 60), LIVES)
def test_shards_are_the_definition(tmp_path_factory, texts, shard_tokens, limit, block_bytes, lives):
    """Also after it was killed after some blocks, several times: the manifest is that of an uninterrupted one."""
    folder = tmp_path_factory.mktemp("prep")
    rows, cut = write_rows(folder / "rows.jsonl", texts), Cut("x", shard_tokens, limit, 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "BLOCK_BYTES", block_bytes)
        patch.setattr(
            atomic_files, "_sync", lambda _: None
        )  # slow for hundreds of files, and not tested here
        for life in lives:
            try:
                prepare(open_source([str(rows)]), BYTES, cut, folder / "a", report=kill_after(life))
            except Killed:
                manifest = shards.read_manifest(folder / "a")
                assert manifest is not None
                assert not manifest.complete
        made, _ = (prepare(open_source([str(rows)]), BYTES, cut, folder / out) for out in "ab")
    want = definition(texts, shard_tokens, limit)
    assert ids_of(folder / "a", "x") == want
    entries = list(made.manifest.shards.values())
    assert [entry.documents for entry in entries] == [shard.count(DOCUMENT) for shard in want]
    assert [entry.text_bytes for entry in entries] == [len(s) - s.count(DOCUMENT) for s in want]
    scored = want[0][1:8]
    assert made.manifest.scored_tokens == len(scored)
    assert made.manifest.scored_bytes == sum(index != DOCUMENT for index in scored)
    assert made.manifest.complete
    assert (folder / "a" / "manifest.json").read_bytes() == (folder / "b" / "manifest.json").read_bytes()


def test_files_and_folders_are_sorted_by_name(tmp_path):
    write_rows(tmp_path / "b.jsonl", ["three", "four"])
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        # Blank lines are not rows; a mark at the start, no newline at the end, numbers as in Python's json.
        file.write('\ufeff{"text": "one", "n": [NaN, 1e999]}\n\n  \n{"text": "two"}')
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "z.txt").write_bytes(b"\xef\xbb\xbffive\r\nlines\n")
    source = open_source([str(tmp_path)])
    assert list(documents.texts(source)) == ["one", "two", "three", "four", "five\r\nlines\n"]
    places = [block.first for block in source.blocks(Position("b.jsonl", 1))]
    assert places == [Position("b.jsonl", 1), Position("c/z.txt", 0)]
    assert [b.read_bytes for b in source.blocks(Position("", 0))][-1] == source.total_bytes


def test_each_file_of_a_folder_is_read_or_named(tmp_path, capsys):
    """Compressed, with capitals, through links; not hidden, in a loop, or of another kind."""
    folder, linked = tmp_path / "texts", tmp_path / "linked"
    for path in (folder, linked, folder / ".ipynb_checkpoints"):
        path.mkdir()
    write_rows(folder / "A.JSONL", ["a"])
    write_rows(folder / ".ipynb_checkpoints" / "a.jsonl", ["hidden"])
    for path, text in ((folder / "b.jsonl.zst", '{"text": "b"}\n'), (folder / "c.txt.zst", "c\n")):
        with pyarrow.CompressedOutputStream(pyarrow.OSFile(str(path), "wb"), "zstd") as file:
            file.write(text.encode())
    write_rows(linked / "d.jsonl", ["d"])
    (folder / "dir").symlink_to(linked)
    (folder / "loop").symlink_to(folder)
    (folder / "gone.txt").symlink_to("nowhere")
    (folder / "._e.jsonl").write_bytes(b"\0")
    (folder / "x.json.gz").write_bytes(b"")
    (folder / "z.TXT.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfz"))
    assert list(documents.texts(open_source([str(folder)]))) == ["a", "b", "c\n", "d", "z"]
    left = "2 hidden (._e.jsonl, ...), 1 no file (gone.txt), 1 linked twice (loop), 1 .json.gz (x.json.gz)"
    assert capsys.readouterr().err == f"left out of {folder}: {left}\n"


def two_columns() -> bytes:
    import pyarrow.parquet

    column, sink = pyarrow.array(["a"]), pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays([column, column], ["text", "text"]), sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.jsonl", b'{"text": "a"}\n[1]\n', "row 1 is not a JSON object"),
        ("x.jsonl", b'{"text": "a"}\n{"text": null}\n', "row 1 has NoneType as 'text'"),
        (
            "x.jsonl.zst",
            pyarrow.Codec("zstd").compress(b"{}", asbytes=True)[:-1],
            "Truncated compressed stream",
        ),
        ("x.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 9, mtime=0)[:-9], "x.jsonl.gz: "),
        ("x.jsonl", b'{"text": "a"}\n{"text": "b\xff"}\n', r"x\.jsonl: row 1 is not UTF-8 at its byte 11"),
        ("x.jsonl", b'{"text": ' + b"[" * 100_000, "row 0 is not JSON"),
        ("x.txt", b"abc\xff", "x.txt: .* position 3"),
        ("x.txt", "abc".encode("utf-16-le"), "x.txt: has NUL characters"),
        ("x.parquet", b"PAR1" + b"\x0e" * 40 + b"\x28\0\0\0PAR1", "x.parquet: Couldn't deserialize thrift"),
        ("x.parquet", two_columns(), "need 'text' once; it has text, text"),
        ("x.csv", b"a,b", "cannot be read"),
        ("x.jsonl", b"", "holds no document"),
    ],
)
def test_a_source_that_cannot_be_read(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        prepare(open_source([str(tmp_path / name)]), BYTES, Cut(), tmp_path / "out")
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(
    ("names", "revision", "error"),
    [
        (["a", "b"], None, UsageError),  # two files have one name
        (["hub:a/b", "a"], None, UsageError),
        (["a"], "main", UsageError),
        (["latin"], None, DataError),
        (["empty"], None, DataError),
        ([""], None, UsageError),  # as "$UNSET" in a shell; not the current folder
    ],
)
def test_sources_that_cannot_be_combined(tmp_path, names, revision, error):
    for file in ("a/x.jsonl", "b/x.jsonl", "latin/\udcff.txt", "empty/x.csv"):
        (tmp_path / file).parent.mkdir()
        write_rows(tmp_path / file, ["text"])
    given = [name if ":" in name or not name else str(tmp_path / name) for name in names]
    with pytest.raises(error):
        open_source(given, revision=revision)


def test_a_changed_setting_is_named(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", ["abc"] * 5)
    out, cut = tmp_path / "out", Cut("x", 4)
    prepare(open_source([str(rows)]), BYTES, cut, out)
    before = shards_of(out)
    with pytest.raises(UsageError, match="with limit_tokens nothing, this is limit_tokens 5"):
        prepare(open_source([str(rows)]), BYTES, cut._replace(limit_tokens=5), out)
    times = rows.stat()
    for texts in (["abc"] * 6, ["abc"] * 4 + ["abd"]):  # another size; an edit of the same size and time
        write_rows(rows, texts)
        os.utime(rows, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(UsageError, match="with files_sha256 "):
            prepare(open_source([str(rows)]), BYTES, cut, out)
    assert shards_of(out) == before


def test_a_prefix_must_be_part_of_a_file_name(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", ["abc"])
    with pytest.raises(UsageError, match="need letters, digits"):
        prepare(open_source([str(rows)]), BYTES, Cut("../x"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_folder_with_other_shards_or_missing_ones(tmp_path):
    rows, out = write_rows(tmp_path / "rows.jsonl", ["abc"] * 5), tmp_path / "out"
    out.mkdir()
    (out / "fineweb_val_000000.bin").write_bytes(b"")
    with pytest.raises(UsageError, match=r"fineweb_val_000000\.bin is there without manifest"):
        prepare(open_source([str(rows)]), BYTES, Cut(), out)
    (out / "fineweb_val_000000.bin").unlink()
    prepare(open_source([str(rows)]), BYTES, Cut(), out)
    (out / "fineweb_val_000000.bin").unlink()
    with pytest.raises(DataError, match="No such file"):
        prepare(open_source([str(rows)]), BYTES, Cut(), out)


def test_the_shards_verify_and_an_unfinished_folder_does_not(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", ["abc" * n for n in range(9)])
    data = track.Data("x", "x_train_*.bin", "x_val_*.bin", 19, 257, DOCUMENT, "again!")
    made = prepare(open_source([str(rows)]), BYTES, Cut("x", 40), tmp_path / "out")
    passed = verify(tmp_path / "out", data, full=True)
    assert sum(shard.tokens for shard in passed) == sum(e.tokens for e in made.manifest.shards.values())
    shards.write_manifest(tmp_path / "out", msgspec.structs.replace(made.manifest, complete=False))
    with pytest.raises(DataError, match="unfinished after 3 shards"):
        shards.open_track(tmp_path / "out", data)


@needs_shared
def test_real_rows_equal_tiktokens_by_document(tmp_path):
    choice = tokenizer.load(str(RANKS))
    assert isinstance(choice, tokenizer.Tiktoken)
    encoding = choice.encoding
    made = prepare(open_source([str(HEAD)]), choice, Cut(shard_tokens=50_000), tmp_path, num_workers=2)
    shards = ids_of(tmp_path)
    assert {len(shard) for shard in shards[:-1]} == {50_000}
    ids = np.array(list(itertools.chain.from_iterable(shards)))
    got = np.split(ids, np.flatnonzero(ids == 50256)[1:])
    with gzip.open(HEAD, "rt") as file:
        texts = [json.loads(line)["text"] for line in file]
    want = [encoding.encode_ordinary(text) for text in texts]
    assert len(want) == 300
    assert [document.tolist() for document in got] == [[50256, *of_text] for of_text in want]
    density = len("".join(texts).encode()) / sum(map(len, want))
    assert f"{density:.2f} bytes a token" in made.summary()[0]


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_rows_are_found_after_an_interruption(tmp_path, kind, monkeypatch):
    """At any place, in a file with several row groups."""
    import pyarrow.parquet

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(documents, "BATCH_ROWS", 7)
    path = tmp_path / "rows" / "rows.parquet"
    path.parent.mkdir()
    texts = [f"row {i} é猫🙂 " + "x" * (i % 13) for i in range(60)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=11)
    folder = str(path.parent)
    cut = Cut("x", 37)

    def source() -> documents.Source:
        return open_source([folder]) if kind == "parquet" else Dataset(folder, None, None, column="text")

    assert list(documents.texts(source())) == texts
    prepare(source(), BYTES, cut, tmp_path / "whole")
    assert ids_of(tmp_path / "whole", "x") == definition(texts, 37)
    for life in (1, 2, 3, 5):
        with pytest.raises(Killed):
            prepare(source(), BYTES, cut, tmp_path / "broken", report=kill_after(life))
    prepare(source(), BYTES, cut, tmp_path / "broken")
    assert shards_of(tmp_path / "broken") == shards_of(tmp_path / "whole")


def test_blocks_are_read_on_demand():
    """Memory does not grow with the corpus, and a closed generator leaves no thread."""
    read: list[int] = []

    def blocks():
        for row in range(1_000):
            read.append(row)
            yield documents.Block(Position("x", row), ["abc"], row)

    encoded = tokenizer.encoded(blocks(), tokenizer.Bytes(), num_workers=3)
    assert [next(encoded).first.row for _ in range(20)] == list(range(20))
    assert len(read) <= 20 + 3 * 3
    encoded.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("encode")]


@needs_shared
def test_the_number_of_workers_does_not_matter(tmp_path):
    """The first block takes longest, so others finish before it."""
    texts = ["a" * 600_000, *(f"row {i} " * 3_000 for i in range(60))]
    rows = write_rows(tmp_path / "rows.jsonl", texts)
    choice = tokenizer.load(str(RANKS))
    for num_workers in (1, 2, 4):
        source, out = open_source([str(rows)]), tmp_path / str(num_workers)
        prepare(source, choice, Cut("x", 99_991), out, num_workers=num_workers)
    assert shards_of(tmp_path / "2") == shards_of(tmp_path / "1")
    assert shards_of(tmp_path / "4") == shards_of(tmp_path / "1")


def test_killed_and_restarted(tmp_path):
    rnd = random.Random(0)
    texts = ["".join(rnd.choices("abcdefgh \n", k=rnd.randrange(400))) for _ in range(12_000)]
    rows = write_rows(tmp_path / "rows.jsonl", texts)
    prepare(open_source([str(rows)]), BYTES, Cut("x", 20_011), tmp_path / "whole")
    argv = command(rows, tmp_path / "out", "--prefix x --shard-tokens 20011 --workers 2")
    for _ in range(3):
        # A session of its own, to check that no process survives the kill.
        process = subprocess.Popen(argv, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL)
        wanted = num_shards(tmp_path / "out") + rnd.randrange(1, 5)
        wait_until(lambda wanted=wanted: num_shards(tmp_path / "out") >= wanted)
        time.sleep(rnd.uniform(0.0, 0.02))
        assert process.poll() is None, "it ended before the kill: it needs more rows"
        process.kill()
        process.wait()
        wait_until(lambda process=process: is_gone(process.pid))
    assert num_shards(tmp_path / "out") < len(shards_of(tmp_path / "whole"))
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "whole")
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {*shards_of(tmp_path / "whole"), "manifest.json"}


def num_shards(folder: Path) -> int:
    return len(list(folder.glob("*.bin")))


def is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def wait_until(is_so: Callable[[], bool]) -> None:
    watch = Stopwatch()
    while not is_so():
        assert watch.seconds < 300, "even a busy machine takes less"
        time.sleep(0.001)


def test_signals_stop_it_and_it_says_how_to_continue(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", ["abc " * 100] * 20_000)
    argv = command(rows, tmp_path / "out", "--shard-tokens 1000 --workers 2")
    process = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: num_shards(tmp_path / "out") > 0)
    os.killpg(process.pid, signal.SIGINT)  # to the process group, as a terminal does
    _, said = process.communicate(timeout=600)
    assert process.returncode == 75, said
    assert "run the same command again to continue" in said
    assert "Traceback" not in said
    wait_until(lambda: is_gone(process.pid))


def test_without_a_network_it_says_what_is_missing(tmp_path, monkeypatch):
    """Nothing listens on the port of HF_ENDPOINT."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    done = invoke("data", "prep", "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert done.exit_code == 3
    assert "hub:HuggingFaceFW/fineweb" in done.stderr
    assert done.stderr.strip().count("\n") == 0
    assert not (tmp_path / "out").exists()


def test_bits_per_byte(tmp_path):
    """A model with probability 1/256 for each byte needs 8 bits per byte, whatever the tokens."""
    rows = write_rows(tmp_path / "rows.jsonl", ["abcd" * 25])
    made = prepare(open_source([str(rows)]), BYTES, Cut("x", 50, scored_tokens=40), tmp_path)
    data = track.Data("x", "x_train_*.bin", "x_val_*.bin", 40, 257, DOCUMENT, "again!")
    assert overview.bits_per_byte(np.log(256), tmp_path, data) == pytest.approx(8)
    assert overview.bits_per_byte(1.0, tmp_path, msgspec.structs.replace(data, val_tokens=39)) is None
    shards.write_manifest(tmp_path, msgspec.structs.replace(made.manifest, scored_bytes=20))
    assert overview.bits_per_byte(np.log(256), tmp_path, data) == pytest.approx(16), "two tokens per byte"


def test_a_lock_whose_holder_just_left_is_taken(tmp_path):
    """It removes its file, for which another one waits."""
    first = lock_folder(tmp_path)
    (holder := threading.Thread(target=first.__enter__)).start()
    holder.join()
    with lock_folder(tmp_path, lambda _: threading.Timer(0.1, first.__exit__, (None, None, None)).start()):
        assert os.path.exists(tmp_path / LOCK)
        with pytest.raises(UsageError), lock_folder(tmp_path, refuse=UsageError):
            pass
