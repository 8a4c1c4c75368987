"""The folder of prepared data."""

import os
from pathlib import Path


def find_cache_folder() -> str:
    """Returns $TFTPU_CACHE, or `tftpu/data` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(os.environ.get("TFTPU_CACHE") or Path(home) / "tftpu" / "data")
