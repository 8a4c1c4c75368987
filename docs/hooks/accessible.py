"""Repairs what Markdown and the theme leave inaccessible; docs/javascripts does the rest."""

import re
from typing import Any

BLOCK_OR_CODE = re.compile(r"<pre.*?</pre>|(?<=<code>)[^<]*-[^<]*(?=</code>)", re.S)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Marks words with dashes in the text's code, and makes empty heads of columns plain cells.

    A browser may break a line after any dash: `--virtual_devices` would end a line with its dashes.
    The stylesheet keeps marked words whole. A head without text heads nothing; screen readers
    would announce it for each cell below.
    """
    html = re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)
    return BLOCK_OR_CODE.sub(_mark, html)


def _mark(found: re.Match) -> str:
    if found[0].startswith("<pre"):
        return found[0]
    whole = r'<span class="whole">\g<0></span>'
    parts = re.split(r"(\s+)", found[0])
    # The name of a flag is marked by itself, too: with its value it may be wider than the page.
    parts[::2] = [
        re.sub(r"^.+$", whole, re.sub(r"^--[\w.-]+(?==)", whole, part)) if "-" in part else part
        for part in parts[::2]
    ]
    return "".join(parts)


def on_post_page(output: str, **_: Any) -> str:
    """Names the theme's search dialog."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)


on_post_template = on_post_page  # 404.html
