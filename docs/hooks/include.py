"""Pages of the documentation that are files of the checkout's root."""

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def on_page_markdown(markdown, page, config, files):
    """Replaces a line `{{ include FILE }}` by a file of the checkout's root."""
    prefix = "{{ include "
    if not markdown.startswith(prefix):
        return markdown
    name = markdown.removeprefix(prefix).split()[0]
    return (ROOT / name).read_text().replace("](docs/", "](")
