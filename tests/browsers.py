"""A browser without a window, for the tests of pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def chromium() -> Iterator[Any]:
    """Chromium, if this machine has it and playwright; else the test is skipped."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    if (path := next(filter(None, map(shutil.which, names)), None)) is None:
        pytest.skip("needs Chromium on the PATH")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def tab(browser: Any, **options: Any) -> Iterator[Any]:
    """A page that fails the test if a script of it fails, or loads what it may not."""
    page, problems = browser.new_page(**options), list[str]()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if "Content Security" in said.text else None)
    page.set_default_timeout(300_000)  # cores may be shared
    yield page
    page.close()
    assert not problems
