"""The documentation site: it is built of the pages of the repository, is whole, and loads nothing from elsewhere."""

import json
import os
import re
import subprocess
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browsers import chromium, tab

ROOT = Path(__file__).parents[2]
MKDOCS = ROOT / "build" / "site.venv" / "bin" / "mkdocs"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("records/**/*.md")])
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]
SHOWN = [name for name in NAMES if name.count("/") < 2 or name.startswith("docs/api/")]
REPOSITORY = "https://example.org/owner/speedrun"


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


def html_of(site: Path, name: str) -> Path:
    path = (site / name).with_suffix(".html")
    return path.with_name("index.html") if path.stem == "README" else path


@pytest.mark.parametrize("name", SHOWN)
def test_every_page_is_in_the_navigation(site, name):
    there = html_of(site, name).relative_to(site).as_posix()
    navigation = re.search(
        r'<nav class="md-nav md-nav--primary.*', (site / "404.html").read_text(), re.DOTALL
    )
    assert navigation
    assert re.search(
        rf'href="[./]*{re.escape(there)}"', navigation[0].replace('href="/."', 'href="index.html"')
    )


def test_the_search_finds_pages_and_names(site):
    found = {
        entry["location"] for entry in json.loads((site / "search/search_index.json").read_text())["docs"]
    }
    assert {"docs/commands.html#exit-codes", "docs/api/recipe.html#speedrun.science.recipe.Recipe"} <= found


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


def test_source_files_are_links_to_the_repository_if_its_url_is_known(tmp_path):
    site = build(tmp_path / "site", SITE_REPOSITORY=REPOSITORY)
    assert f'href="{REPOSITORY}/blob/HEAD/speedrun/science/step.py"' in (site / "index.html").read_text()
    assert not [*site.rglob("*.py")]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...


@pytest.mark.page
def test_on_a_phone_pages_fit_and_the_search_works_without_other_hosts(site):
    handler = partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, chromium() as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home, asked = f"http://127.0.0.1:{server.server_port}/", []
        with tab(browser, viewport={"width": 390, "height": 844}) as page:
            page.on("request", lambda request: asked.append(request.url))
            for name in SHOWN:
                page.goto(home + html_of(site, name).relative_to(site).as_posix())
                page.wait_for_function(
                    "!document.querySelector('article table:not([class])') || "
                    "document.querySelector('.md-typeset__table')"
                )
                assert page.evaluate("document.documentElement.scrollWidth") == 390, name
            page.locator("label.md-header__button[for=__search]").click()
            page.locator("input[name=query]").press_sequentially("--resume", delay=50)
            first = page.locator(".md-search-result__item a").first
            assert "operator.html" in first.get_attribute("href"), "not the log, which has every word"
        server.shutdown()
    assert not [url for url in asked if not url.startswith((home, "data:", "blob:"))]
