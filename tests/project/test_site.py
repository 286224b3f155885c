"""The documentation site: it is built of the pages of the repository, is whole, and loads nothing from elsewhere."""

import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
MKDOCS = ROOT / "build" / "site.venv" / "bin" / "mkdocs"


def build(folder: Path, **variables: str) -> Path:
    if not MKDOCS.exists():
        pytest.skip("needs MkDocs: run scripts/site.sh")
    argv = [MKDOCS, "build", "--strict", "--quiet", "-f", ROOT / "docs" / "mkdocs.yml", "--site-dir", folder]
    done = subprocess.run(argv, env={**os.environ, **variables}, stdout=-1, stderr=-2, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("site"), SITE_REPOSITORY="")


class Page(HTMLParser):
    """Addresses in a page by tag."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.addresses: list[tuple[str, str]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        tag_of = f"link {given.get('rel')}" if tag == "link" else tag
        self.addresses += [(tag_of, str(given[key])) for key in ("href", "src") if given.get(key)]


def test_every_address_is_a_file_of_the_site_and_only_links_leave_it(site):
    wrong = []
    for path in site.rglob("*.html"):
        for tag, address in Page(path.read_text()).addresses:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                wrong += [] if tag in ("a", "link canonical") else [(path, tag, address)]
            elif parts.path and path.name != "404.html":
                there = path.parent / unquote(parts.path)
                wrong += (
                    [] if (there / "index.html" if there.is_dir() else there).is_file() else [(path, address)]
                )
    assert not wrong
    sheets = [path.read_text() for path in site.rglob("*.css")]
    assert sheets
    assert not [
        url for text in sheets for url in re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*", text)
    ]
