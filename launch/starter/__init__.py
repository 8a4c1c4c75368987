"""The files of `tftpu init`: texts in this folder, in which NAME is the project's name."""

from pathlib import Path

MODULES = ("data", "model")  # modules that a project has beside its config


def render_files(name: str) -> dict[str, str]:
    """Returns the text of each file of a project, by its path in it.

    Args:
        name: the name of the project.
    """
    paths = {
        f"{name}.py": "config.py.txt",
        "model.py": "model.py.txt",
        "data.py": "data.py.txt",
        f"test_{name}.py": "test.py.txt",
        "README.md": "README.md.txt",
        ".gitignore": "gitignore.txt",
    }
    folder = Path(__file__).parent
    return {path: (folder / text).read_text().replace("NAME", name) for path, text in paths.items()}
