"""Links of the site: a folder's to its README, and a source file's to the repository or, without a URL, to a copy."""

import re
from posixpath import dirname, join, normpath

from mkdocs.structure.files import InclusionLevel


def on_page_markdown(markdown, page, config, files):
    """Return the text with such links rewritten. MkDocs checks the others."""

    def target(link):
        uri = normpath(join(dirname(page.file.src_uri), link[0]))
        if files.get_file_from_path(f"{uri}/README.md"):
            return f"{link[0]}/README.md"
        if (file := files.get_file_from_path(uri)) and file.inclusion.is_excluded():
            if config.repo_url:
                return f"{config.repo_url}/blob/HEAD/{uri}"
            file.inclusion = InclusionLevel.NOT_IN_NAV
        return link[0]

    # Logs, measurements, records and the API have every word.
    if re.search("LOG|benchmarks/|records/.+-.+/|/api/(?!package)", page.file.src_uri):
        page.meta["search"] = {"boost": 0.1}
    markdown = re.sub(r"(?<=\]\()[^)#:]+(?=[)#])", target, markdown)
    return re.sub(r"^!\[[^]]*\]\(([^)]+)\)$", r"[\g<0>](\1)", markdown, flags=re.MULTILINE)
