"""Makes the wheel and the sdist of a release, and tries them: `make release`.

    python .ci/release.py [VERSION]

Without a version, the one that the changelog announces. In order: the changelog is closed, the
version is set wherever it is written, wheel and sdist are built, twine checks what an index would
show, and the wheel is installed into a new environment of every Python that it allows and that this
machine has, where it trains. The changed files are left to be committed; `dist/` has the archives.
Whoever owns the name on an index pushes the tag: `.github/workflows/publish.yml` does the rest.
"""

import datetime
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
PYTHONS = ("3.11", "3.12", "3.13")
_OPEN = "## [Unreleased]\n"


def main(words: list[str]) -> None:
    """Makes a release of the version in the words, or of the next one."""
    before = read_version()
    version = words[0] if words else before.partition(".dev")[0]
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        sys.exit(f"{version} is not a version such as 0.2.0.")
    if run("git", "status", "--porcelain", "--untracked-files=no"):
        sys.exit("There are changes that are not committed: a release is made of a commit.")
    changed = write_version(before, version)
    close_changelog(version)
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        tools = make_environment(sys.executable, Path(scratch) / "tools", "build", "twine")
        say("building")
        run(tools, "-m", "build", "--outdir", str(DIST), ".")
        wheel, sdist = (next(DIST.glob(ending)) for ending in ("*.whl", "*.tar.gz"))
        run(tools, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
        check_metadata(wheel, version)
        tried = [try_wheel(wheel, name, Path(scratch)) for name in PYTHONS]
    print(f"{wheel.name}, {sdist.name}: tried on Python {', '.join(filter(None, tried))}")
    print(f"changed: CHANGELOG.md, {', '.join(changed)}. To publish:")
    print(
        f"  git commit -am 'Version {version}' && git tag v{version} && git push origin v{version}"
    )


def read_version() -> str:
    """Returns the version of the checkout."""
    text = (ROOT / "tftpu/version.py").read_text()
    return re.findall(r'"(.+)"', text)[0]


def write_version(before: str, version: str) -> list[str]:
    """Puts a version in the place of another, in code and in file names of the documentation."""
    changed = []
    files = [ROOT / "tftpu/version.py", ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for path in files:
        text = path.read_text()
        if before != version and before in text:
            path.write_text(text.replace(before, version))
            changed.append(str(path.relative_to(ROOT)))
    return changed


def close_changelog(version: str) -> None:
    """Gives the entries that are not released yet the version and the date of today."""
    path = ROOT / "CHANGELOG.md"
    text = path.read_text()
    if f"## [{version}]" in text:
        return
    head, mark, entries = text.partition(_OPEN)
    if not mark or not re.match(r"\s*(To become .*?\n\n)?### ", entries, re.DOTALL):
        sys.exit("CHANGELOG.md has no entries under [Unreleased].")
    announced = re.match(r"\s*To become .*?\.dev0\. ", entries)
    entries = entries[announced.end() :] if announced else entries.lstrip("\n")
    heading = f"## [{version}] - {datetime.date.today()}"
    path.write_text(f"{head}{_OPEN}\n{heading}\n\n{entries}")


def check_metadata(wheel: Path, version: str) -> None:
    """Exits unless a wheel says its version and its Pythons, and holds the package alone."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
        inside = {path.split("/")[0] for path in archive.namelist()}
    for line in (f"Version: {version}", "Name: tftpu", "License: Apache-2.0"):
        if line not in text.splitlines():
            sys.exit(f"The metadata of {wheel.name} lack {line!r}.")
    if inside != {"tftpu", f"tftpu-{version}.dist-info"}:
        sys.exit(f"{wheel.name} holds {sorted(inside)}: it must hold the package alone.")


def try_wheel(wheel: Path, name: str, scratch: Path) -> str:
    """Installs a wheel for a Python, and trains; returns its name, "" if it is not here."""
    python = shutil.which(f"python{name}")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True).returncode:
        say(f"Python {name} is not on this machine: not tried")
        return ""
    say(f"installing for Python {name}")
    place = make_environment(python, scratch / name, f"{wheel}[cpu]")
    tftpu = str(Path(place).parent / "tftpu")
    line = ["train", "digits_resnet", "--config.train.steps=20", f"--workdir={scratch}/run-{name}"]
    run(tftpu, *line, folder=scratch)
    return name


def make_environment(python: str, place: Path, *packages: str) -> str:
    """Returns the Python of a new environment with these packages."""
    run(python, "-m", "venv", str(place))
    inside = str(place / "bin/python")
    run(inside, "-m", "pip", "install", "-q", *packages)
    return inside


def run(*command: str, folder: Path = ROOT) -> str:
    """Returns what a command prints; exits with its output if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def say(text: str) -> None:
    """Prints what is being done."""
    print(f"{text} …", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
