#!/usr/bin/env bash
# Builds the documentation site in build/site, with packages of its own in build/site.venv.
#
#   scripts/site.sh                                       builds; any link that leads nowhere is an error
#   build/site.venv/bin/mkdocs serve -f docs/mkdocs.yml   serves it, and builds it again when a page changes
#
# The page that trains in a browser (docs/demo.md) takes a minute and the environment of scripts/install.sh.
# SITE_REPOSITORY is the URL for links to source files; without it, the site has copies of them.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/help.sh" "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p build/pages
ln -sfn "$PWD"/{*.md,LICENSE,docs,jobs,records,speedrun,tests} build/pages
[[ -x .venv/bin/python ]] || die "found no .venv; run scripts/install.sh first"
rm -rf build/pages/demo
.venv/bin/python -m speedrun.model.demo.folder build/pages/demo README.md RULES.md docs/[!L]*.md docs/LOG.md # tables last
"${PYTHON:-python3}" -m venv build/site.venv
build/site.venv/bin/pip --disable-pip-version-check --quiet install --no-deps --require-hashes -r requirements/site.lock
NO_MKDOCS_2_WARNING=1 build/site.venv/bin/mkdocs build --strict --quiet -f docs/mkdocs.yml
