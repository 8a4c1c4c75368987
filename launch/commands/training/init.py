"""Writes a project of your own: a config, a model, data that are drawn by code, and tests.

The project trains at once, and every file says what to change. A folder of pictures needs no
project: README.md has a config of one file, photos.py, that trains on such a folder.

    tftpu init flowers
"""

import dataclasses
from pathlib import Path

from tftpu.errors import UserError
from tftpu.launch import starter
from tftpu.launch.settings.options import required
from tftpu.launch.settings.own_code import check_name
from tftpu.storage import files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The project to write."""

    name: str = required(
        "NAME", "name of the project: of a new folder, and of the config in it", word=True
    )


def run(options: Options) -> None:
    """Writes the files, and says what to do next.

    Raises:
        UserError: a name that Python cannot import, or a folder that has files already.
    """
    folder = Path(options.name)
    name = folder.name
    if not name.isidentifier() or name in starter.MODULES:
        raise UserError(
            f"A project cannot be named {name!r}: its config is imported under that name. Use "
            f"letters, digits and _, but not the names {', '.join(starter.MODULES)}."
        )
    check_name(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder} exists already: give another name, such as {files.suggest_path(folder)}. To "
            "train on a folder of pictures, no project is needed: see photos.py in README.md."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in starter.render_files(name).items():
        (folder / file).write_text(text)
        print(folder / file)
    print(f"\nTry:  cd {folder}; tftpu train {name}.py")
