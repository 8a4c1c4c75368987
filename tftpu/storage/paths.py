"""Names of files that come from a file, which may be a stranger's."""

import posixpath


def is_inside(name: str) -> bool:
    """Returns whether a name, relative to a folder, is that of a file in it or below it.

    A name that leaves the folder (`../x`, `/x`, `gs://b/x`) is not.
    """
    parts = name.split("/")
    return (
        bool(name)
        and name == posixpath.normpath(name)
        and ".." not in parts
        and not name.startswith("/")
        and "://" not in name
        and "\\" not in name
        and "\0" not in name
        and name != "."
    )
