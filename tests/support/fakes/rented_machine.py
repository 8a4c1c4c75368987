"""A rented machine on this one: runs a launcher's script in bash, with stand-ins for its programs.

`gcloud` reads and writes a folder in place of the buckets, or a service on loopback. `python3`
notes what it is asked to install; `installing()` makes it build a virtual environment, into which
the wheel that was sent is really installed. It sees the packages of the tests, but not their tftpu.
"""

import subprocess
import sys
from pathlib import Path

# `gcloud storage cp --quiet SOURCE TARGET`, on the service that STORAGE_EMULATOR_HOST names.
_GCLOUD = f"""\
#!{sys.executable} -S
import os, shutil, sys, urllib.request
if sys.argv[1] != "storage":
    sys.exit()  # it deletes the slice
source, target = sys.argv[4:6]
def address(name, rest):
    bucket, _, name = name.removeprefix("gs://").partition("/")
    host = os.environ["STORAGE_EMULATOR_HOST"]
    return host + rest.format(bucket, name.replace("/", "%2F"))
if source.startswith("gs://"):
    url = address(source, "/download/storage/v1/b/{{}}/o/{{}}?alt=media")
    if os.path.isdir(target):
        target = os.path.join(target, source.rpartition("/")[2])
    with urllib.request.urlopen(url) as answer, open(target, "wb") as file:
        shutil.copyfileobj(answer, file)
else:
    url = address(target, "/upload/storage/v1/b/{{}}/o?uploadType=media&name={{}}")
    with open(source, "rb") as file:
        urllib.request.urlopen(urllib.request.Request(url, file.read(), method="POST"))
"""
# `python3 -m uv venv ... VENV` and `python3 -m uv pip install --python=VENV/bin/python ... WHAT`.
_PYTHON = """\
#!/bin/bash
set -e
printf "%s\\n" "$*" >>"{folder}/asked"
case "$3" in
  venv) "{python}" -m venv --without-pip "${{@: -1}}" ;;
  pip)
    for word in "$@"; do
      case "$word" in --python=*) there="${{word#--python=}}" ;; esac
    done
    "{python}" -m pip --python="$there" install --quiet --no-deps --no-index "${{@: -1}}"
    cd "$(dirname "$there")"/../lib/python*/site-packages
    printf "%s\\n" {packages} >others.pth
    ;;
esac
"""


class RentedMachine:
    """A machine on disk.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.home = folder / "home"
        self.bucket = folder / "bucket"  # buckets as folders
        self.bin = folder / "bin"
        for path in (self.bin, self.bucket):
            path.mkdir()
        copy = f'cp "${{4/gs:\\/\\//{self.bucket}/}}" "${{5/gs:\\/\\//{self.bucket}/}}"'
        remove = f'rm "${{4/gs:\\/\\//{self.bucket}/}}"'
        self.tool(
            "gcloud",
            f'case "$1 $2" in "storage rm") {remove} ;; storage*) {copy} ;; '
            f"*) {self.noted('called')} ;; esac",
        )
        self.tool("python3", f'printf "%s\\n" "${{@: -1}}" >>"{folder}/installed"')
        self.tool("sleep", f"{self.noted('slept')}; exec /bin/sleep 0.05")
        self.tftpu('printf "%s\\0" "$@" >>"$ARGUMENTS"; echo trained')

    def noted(self, file: str) -> str:
        """Returns a line of bash that writes a program's arguments to a line of a file."""
        return f'printf "%s\\n" "$*" >>"{self.folder}/{file}"'

    def lines(self, file: str) -> list[str]:
        """Returns the lines of such a file."""
        path = self.folder / file
        return path.read_text().splitlines() if path.exists() else []

    def tool(self, name: str, line: str, where: Path | None = None) -> None:
        """Writes a program of one line of bash."""
        self.program(name, f"#!/bin/bash\n{line}\n", where)

    def program(self, name: str, text: str, where: Path | None = None) -> None:
        """Writes a program."""
        path = (where or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def tftpu(self, line: str) -> None:
        """Replaces the `tftpu` of the machine."""
        self.tool("tftpu", line, self.home / "venv" / "bin")

    def installing(self) -> None:
        """Lets the machine really install the wheel, without a network; it needs no TPU."""
        for path in (self.home / "venv" / "bin").iterdir():
            path.unlink()
        others = [path for path in sys.path if path.endswith("-packages")]
        packages = " ".join(f'"{path}"' for path in others)
        text = _PYTHON.format(folder=self.folder, python=sys.executable, packages=packages)
        self.program("python3", text)
        self.program("gcloud", _GCLOUD)
        self.tool("sleep", "exec /bin/sleep 1")

    def put(self, address: str, files: dict[str, bytes]) -> None:
        """Puts files into a folder of a bucket, where they appear whole."""
        folder = self.bucket / address.removeprefix("gs://")
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            written = self.folder / f"{name}.written"
            written.write_bytes(data)
            written.replace(folder / name)

    def run(self, command: list[str], timeout: float = 60, **environment: str) -> str:
        """Runs a command of the machine; returns what it printed."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={
                "PATH": f"{self.bin}:/usr/bin:/bin",
                "TFTPU_HOME": str(self.home),
                "ARGUMENTS": str(self.folder / "arguments"),
                "NO_GCE_CHECK": "true",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        self.code = done.returncode
        return done.stdout

    def boot(self, script: str, name: str) -> Path:
        """Runs a startup script; returns the folder that it reports to."""
        reports = self.bucket / "b" / "run" / "launch" / name
        reports.mkdir(parents=True, exist_ok=True)
        path = self.folder / "startup-script"
        path.write_text(script)
        said = self.run(["bash", str(path)])
        assert self.code == 0, said
        return reports

    def arguments(self) -> list[str]:
        """Returns the arguments that `tftpu` was called with."""
        return (self.folder / "arguments").read_text().split("\0")[:-1]

    def installed(self) -> list[str]:
        """Returns the last argument of each call of `python3`."""
        return self.lines("installed")
