"""Check Python and its packages, against declared minimum versions and against the lock files."""

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata

from speedrun.base import provenance
from speedrun.machine.finding import Check, numbers
from speedrun.record import git_history

_INSTALL = "scripts/install.sh"


def checks() -> Iterator[Check]:
    """Check minimum versions, which all else needs, then the lock."""
    version = ".".join(map(str, sys.version_info[:3]))
    try:
        python, requirements = declared()
    except metadata.PackageNotFoundError:
        yield Check("speedrun", "not installed; its floors are unknown; pip install -e .", ok=False)
        return
    yield floor("python", version, f"python{python}")
    packages = list(_packages(requirements))
    yield from (check for check in packages if not check.ok)
    if all(check.ok for check in packages):
        versions = {check.name: check.found for check in packages}
        said = ", ".join(f"{name} {version}" for name, version in versions.items())
        yield Check("packages", said, ok=True, facts={**versions})
    yield lock()


def declared() -> tuple[str, list[str]]:
    """Return the requirements on Python and packages: of pyproject.toml beside the code, else of the package.

    Raises:
        PackageNotFoundError: if there is neither.
    """
    if text := git_history.files_here(["pyproject.toml"]).get("pyproject.toml"):
        project = tomllib.loads(text.decode())["project"]
        return project["requires-python"], project["dependencies"]
    about, requirements = metadata.metadata("speedrun"), metadata.requires("speedrun") or []
    return about["Requires-Python"], [one for one in requirements if "extra ==" not in one]


def _packages(requirements: list[str]) -> Iterator[Check]:
    for requirement in requirements:
        name = re.split(r"[<>=!~; ]", requirement)[0]
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Check(name, f"missing; need {requirement}; pip install -e .", ok=False)
        else:
            yield floor(name, version, requirement)


def floor(name: str, version: str, requirement: str) -> Check:
    """Check a requirement with `>=`, the only form in use here."""
    if numbers(version) >= numbers(requirement.partition(">=")[2]):
        return Check(name, version, ok=True)
    return Check(name, f"{version}; need {requirement}; pip install -e .", ok=False)


def lock() -> Check:
    """Check that all pins of a lock file are installed, which a ranked record needs."""
    if fits := provenance.lock().name:
        found, facts = f"every package as requirements/{fits} pins it", {"lock": fits}
        return Check("lock", found, ok=True, needed=False, facts=facts)
    found = f"not every package is as a lock file pins it; for a ranked record: {_INSTALL}"
    return Check("lock", found, ok=False, needed=False)
