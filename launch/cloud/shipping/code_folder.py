"""The folder of a user's config: the files that are sent to a rented machine, and their archive.

Files that `.gitignore` names are not sent, nor are hidden folders, caches, virtual environments and
`runs`.
"""

import gzip
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tftpu.errors import UserError
from tftpu.launch.cloud.shipping import secret_files

LIMIT = 64 << 20  # bytes; a larger folder holds data, which belongs in a bucket
ASKED = 1 << 20  # bytes of data; more are sent only after a confirmation
_CODE = (
    *(".py", ".pyi", ".ipynb", ".md", ".rst", ".txt", ".toml", ".cfg", ".ini", ".yaml", ".yml"),
    *(".json", ".sh"),
)
_STAYS = ("__pycache__", "node_modules", "runs")
_WAY_OUT = "name it in .gitignore, or move it out of the folder"


def choose_name(folder: Path) -> str:
    """Returns the name that a config's folder gets on the rented machine."""
    return folder.name or "code"


def read_files(folder: Path) -> dict[str, bytes]:
    """Returns the contents of the files to send, by their path in the folder, sorted.

    Args:
        folder: an absolute path.

    Raises:
        UserError: a file looks like a secret, a link leads to something that is not sent, the
            files are too large, or there are .gitignore files but no git.
    """
    names = _list_files(folder)
    _check_links(folder, names)
    sizes = {name: (folder / name).stat().st_size for name in names if (folder / name).is_file()}
    if sum(sizes.values()) > LIMIT:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        shown = ", ".join(f"{name} ({sizes[name] / 1e6:,.1f} MB)" for name in largest)
        raise UserError(
            f"The folder {folder} has {sum(sizes.values()) / 1e6:,.0f} MB and is sent with the "
            f"config, but the limit is {LIMIT / 1e6:.0f} MB. The largest files are {shown}. List "
            "files that are not code in .gitignore, move data to a bucket, or give the config "
            "its own folder."
        )
    files = {name: (folder / name).read_bytes() for name in sizes}
    secrets = {
        name: why
        for name, data in files.items()
        if (why := secret_files.find_secret(name.rpartition("/")[2], data))
    }
    if secrets:
        shown = ", ".join(f"{name} ({why})" for name, why in secrets.items())
        # JSON cannot have an allowlist comment, and none helps if the file's name is suspicious.
        has_comments = any(
            ", line " in why and not name.endswith((".json", ".ipynb"))
            for name, why in secrets.items()
        )
        comment = "or, if a line has no secret, end it with the comment `pragma: allowlist secret`"
        raise UserError(
            f"The folder {folder} would be sent with the config, but it has files that look like "
            f"secrets: {shown}. For each, {_WAY_OUT}{', ' + comment if has_comments else ''}. A "
            "machine of Google Cloud has the rights of its service account, so it needs no key."
        )
    return files


def measure_data(sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the bytes of data in each top-level file or folder (NAME/) with more than `ASKED`.

    Args:
        sizes: the sizes in bytes of the files to send, by their path in the folder. Files larger
            than `ASKED`, and files without a suffix in `_CODE`, count as data.
    """
    found: dict[str, int] = {}
    for name, size in sizes.items():
        if size > ASKED or not name.lower().endswith(_CODE):
            first, slash, _ = name.partition("/")
            found[first + slash] = found.get(first + slash, 0) + size
    return {name: size for name, size in found.items() if size > ASKED}


def _check_links(folder: Path, names: list[str]) -> None:
    """Raises `UserError` for a link to a folder, or to a file that is not sent itself."""
    travel = {folder.resolve() / name for name in names}
    for path in (folder / name for name in names):
        if not path.is_symlink() or not path.exists():
            continue
        if path.is_dir():
            what = "a link to a folder, which is not sent: copy the folder"
        elif path.resolve() not in travel:
            what = f"a link to {path.resolve()}, which is not sent: copy the file"
        else:
            continue
        raise UserError(f"{path} is {what} here, or {_WAY_OUT}.")


def build_archive(name: str, files: dict[str, bytes]) -> bytes:
    """Returns a .tar.gz of files in a named folder. Equal files give equal bytes."""
    target = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=target, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for path, data in files.items():
            entry = tarfile.TarInfo(f"{name}/{path}")
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    return target.getvalue()


def _list_files(folder: Path) -> list[str]:
    """Returns the paths of all files to send."""
    root = next((p for p in (folder, *folder.parents) if (p / ".git").exists()), folder)
    found = list(_walk_folder(folder))
    above = folder.relative_to(root).parents if folder != root else ()
    rules = [name for name in found if name.rpartition("/")[2] == ".gitignore"]
    rules += [str(root / p / ".gitignore") for p in above if (root / p / ".gitignore").exists()]
    if not rules:
        return sorted(found)
    if not shutil.which("git"):
        raise UserError(f"git is needed to apply {rules[0]}: install git, or remove that file.")
    ignored = _find_ignored(root, [str((folder / name).relative_to(root)) for name in found])
    return sorted(name for name in found if str((folder / name).relative_to(root)) not in ignored)


def _walk_folder(folder: Path) -> list[str]:
    """Returns the paths of all files and links outside of folders that are never sent."""
    found = []
    for path, folders, names in os.walk(folder):
        here = Path(path)
        travel = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in _STAYS
            and not name.endswith(".egg-info")
            and not (here / name / "pyvenv.cfg").exists()
        ]
        linked = [name for name in travel if (here / name).is_symlink()]
        folders[:] = [name for name in travel if name not in linked]
        kept = [n for n in (*names, *linked) if n != ".git" and not n.endswith(".pyc")]
        found += [(here / name).relative_to(folder).as_posix() for name in kept]
    return found


def _find_ignored(root: Path, names: list[str]) -> set[str]:
    """Returns the paths that git ignores, according to the `.gitignore` files in a folder.

    Git runs with a new, empty repository, because it rejects repositories of another user.
    """
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["git", "init", "--quiet", scratch], check=True, env=clean)
        command = ["git", f"--git-dir={scratch}/.git", f"--work-tree={root}", "check-ignore"]
        done = subprocess.run(
            [*command, "--no-index", "-z", "--stdin"],
            input="\0".join(names).encode(errors="surrogateescape"),
            capture_output=True,
            cwd=root,
            env=clean,
        )
    if done.returncode not in (0, 1):  # git exits with 1 if it ignores none of the files
        said = done.stderr.decode(errors="replace").strip()
        raise UserError(f"git cannot apply the .gitignore files of {root}: {said}")
    return set(done.stdout.decode(errors="surrogateescape").split("\0"))
