"""The scan for secrets: every known shape in every kind of file, and no false alarm in a real record."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedrun.board import leaks

NOBODY = leaks.own_shapes({}, host="localhost")
HEX40 = "0123456789abcdef0123456789abcdef01234567"

#: Assembled here, so that no file of this project looks as if it held one.
TOKENS = {
    "a Hugging Face token": "hf_" + "aZ" * 17,
    "a wandb key": "wandb_v1_" + "aZ9_" * 20,
    "a GitHub token": "ghp_" + "aZ9" * 12,
    "a GitLab token": "glpat-" + "aZ9-" * 5,
    "an AWS key id": "AKIA" + "IOSFODNN7EXAMPLE",
    "a Google key": "AIza" + "aZ9_-" * 7,
    "a Slack token": "xoxb-" + "1234567890-" * 3,
    "a PyPI token": "pypi-" + "AgEIcHlw" * 8,
    "an API key": "sk-" + "aZ9" * 16,
    "a private key": "-----BEGIN OPENSSH " + "PRIVATE KEY-----",
    "a URL with a password": "https://somebody:" + "p4ssword@example.org/x.git",
}
MORE = {
    "github_pat_" + "11ABCDEFG0" * 8: "a GitHub token",
    "gho_" + "aZ9" * 12: "a GitHub token",
    "sk-proj-" + "aZ_-" * 10: "an API key",
    "sk-ant-" + "api03-aZ_9" * 5: "an API key",
    "-----BEGIN " + "PRIVATE KEY-----": "a private key",
    "-----BEGIN PGP " + "PRIVATE KEY BLOCK-----": "a private key",
    "redis://:" + "p4ssword@localhost:6379": "a URL with a password",
    f"WANDB_API_KEY={HEX40}": "a wandb key",
    f'{{"wandb": "{HEX40}"}}': "a wandb key",
    f"of commit x, key {HEX40}": "a wandb key",
}
#: Kinds of file, each with the token on its second line.
FORMS = {
    "text": lambda token: f"first\nsecond {token}\n".encode(),
    "json": lambda token: b'{\n"b": ' + json.dumps([token], ensure_ascii=False).encode() + b"}",
    "source": lambda token: f"import jax\nlogin(token='{token}')\n".encode(),
    "png": lambda token: b"\x89PNG\n\x1a\xff\xfe" + token.encode() + b"\xff\x00",
    "UTF-16": lambda token: f"first\n{token}".encode("utf-16"),
}


def secrets(raw: bytes, own=NOBODY) -> list[tuple[int, str]]:
    return [(leak.line, leak.kind) for leak in leaks.find(raw, own) if leak.secret]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("token", "kind"), [*((t, k) for k, t in TOKENS.items()), *MORE.items()], ids=lambda x: x[:12]
)
def test_every_shape_is_found_in_every_kind_of_file(token, kind, form):
    assert set(secrets(FORMS[form](token))) == {(2, kind)}


@given(st.text(), st.text(), st.sampled_from(sorted(TOKENS)))
def test_a_token_is_found_whatever_surrounds_it(before, after, kind):
    raw = f"{before}\n{TOKENS[kind]}\n{after}".encode(errors="surrogatepass")
    assert (before.count("\n") + 2, kind) in secrets(raw)


@pytest.mark.parametrize(
    "text",
    [
        HEX40 + HEX40[:24],
        '"init_hash": "25564a2e9f0b1c2d"',
        f'revision = "{HEX40}"',
        f'{{"val_tokens":1,"token":0,"revision":"{HEX40}"}}',
        f"https://huggingface.co/datasets/x/resolve/{HEX40}/a.bin",
        f"modded-nanogpt@{HEX40}",
        "0x1.92d4ac0000000p+13",
        "sk-learn-compatible-estimators-of-many-kinds",
        "task-abcdefghijklmnopqrstuvwxyz",
        "half_" + "z" * 40,
        "https://example.org:8080/a@b",
        "https://example.org/a:b@example.org",
        "-----BEGIN CERTIFICATE-----",
        "git@example.org:a/b.git",
    ],
)
def test_common_contents_of_records_are_no_alarm(text):
    assert leaks.find(text.encode(), NOBODY) == []


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "MY_SECRET", "DB_PASSWORD", "aws_secret_access_key"]
)
@pytest.mark.parametrize("value", ["correct-horse", 'quo"te\\back/slash', "ümläut wörd", "two\nlines of it"])
@pytest.mark.parametrize("form", sorted(FORMS.keys() - {"UTF-16"}))
def test_values_of_secret_variables_are_found(name, value, form):
    raw = FORMS[form](value)
    own = leaks.own_shapes({name: f" {value}\n", "PATH": "/bin"}, host="localhost")
    kinds = {kind for _, kind in secrets(raw, own)}
    assert kinds == {f"the value of ${name}"}
    assert value not in repr(leaks.find(raw, own))


@pytest.mark.parametrize(
    ("name", "value"),
    [("HF_TOKEN", "short"), ("GIT_AUTHOR_NAME", "some body"), ("TOKEN", ""), ("PATH", "/usr/local/bin")],
)
def test_switches_names_and_paths_are_no_secrets(name, value):
    own = leaks.own_shapes({name: value}, host="localhost")
    assert leaks.find(f"a {value} b /usr/local/bin".encode(), own) == []


def test_traces_of_a_person_or_a_machine_are_warnings():
    own = leaks.own_shapes({"HOME": "/data/people/jane"}, host="node17.cluster.example")
    homes = ["/home/jane/x", "/Users/jane", r"C:\Users\jane", r"C:\\Users\\jane", "/data/people/jane/y"]
    none = "node171 has /data/people/janet, /home, example.org/home/x and anode17"
    text = "\n".join([*homes, "on NODE17", "node17.cluster.example", none])
    found = leaks.find(text.encode(), own)
    assert not any(leak.secret for leak in found)
    kinds = ["a home folder"] * 4 + ["your home folder"] + ["the name of this machine"] * 2
    assert [(leak.line, leak.kind) for leak in found] == list(enumerate(kinds, start=1))
    assert leaks.own_shapes({"HOME": "/root"}, host="localhost") == (), "root has no name"


def test_values_that_are_not_text_are_found():
    value = os.fsdecode(b"\xff\xfe" + b"secret-canary")
    own = leaks.own_shapes({"A_TOKEN": value}, host="localhost")
    assert secrets(b"x " + os.fsencode(value), own) == [(1, "the value of $A_TOKEN")]
