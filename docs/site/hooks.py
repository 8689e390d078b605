"""What the site needs beside the pages: links that leave docs/ become plain text."""

import re
from pathlib import PurePosixPath
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^]]+)\]\(((?:\.\./)+[^)\s#]+)[^)]*\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links to files of the repository that are no pages by their text."""
    depth = len(PurePosixPath(page.file.src_uri).parts) - 1

    def text(link: re.Match[str]) -> str:
        return link[1] if link[2].count("../") > depth else link[0]

    return _LINK.sub(text, markdown)
