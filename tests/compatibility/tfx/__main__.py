"""Makes a Debian 13 root with TFX and this checkout, and runs the pipeline in it; as root.

    python -m tests.compatibility.tfx --root=FOLDER [--mirror=URL]

TFX's packages ask for a newer C library than Debian 12 has. A root that is there already is used
again; without --mirror, it comes from where this system gets its packages. A system with glibc 2.39
or later needs no root: see `pipeline.py`.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.repository import checkout

PACKAGES = "python3.13,python3.13-dev,python3.13-venv,g++,ca-certificates"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


def mirror() -> str:
    """Returns where apt gets Debian's packages."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian"]
    found = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()
    if not found:
        sys.exit("apt knows no mirror of Debian: give --mirror=URL.")
    return found[0]


def make(root: Path, address: str) -> None:
    """Makes a root with Python 3.13 and an empty environment in it."""
    include = f"--include={PACKAGES}"
    command = ["debootstrap", "--variant=minbase", include, "trixie", str(root), address]
    subprocess.run(command, check=True)
    shutil.copy(CERTIFICATES, f"{root}{CERTIFICATES}")  # as an index may need one of this system's
    run(root, "python3.13", "-m", "venv", "/venv")


def run(root: Path, *command: str) -> None:
    """Runs a command in the root, with this system's names of hosts; exits if it fails."""
    for name in ("resolv.conf", "hosts"):
        shutil.copy(f"/etc/{name}", root / "etc" / name)
    settings = {
        n: v for n, v in os.environ.items() if n == "PIP_INDEX_URL" or "_proxy" in n.lower()
    }
    variables = {
        **settings,
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "PIP_CERT": CERTIFICATES,
        "PYTHONPATH": "/",  # the tests
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    done = subprocess.run(["chroot", str(root), *command], env=variables, cwd="/")
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    """Makes what is missing, installs this checkout, and runs the pipeline."""
    parser = argparse.ArgumentParser(prog="python -m tests.compatibility.tfx")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--mirror")
    given = parser.parse_args()
    root = given.root.absolute()
    if not (root / "venv").exists():
        make(root, given.mirror or mirror())
    for name in ("checkout", "tests", "pipeline"):
        shutil.rmtree(root / name, ignore_errors=True)
    checkout.copy(root / "checkout")
    shutil.copytree(checkout.ROOT / "tests", root / "tests")
    pip = ("/venv/bin/python", "-m", "pip")
    run(root, *pip, "install", "-q", "/checkout[tfx]")
    run(root, *pip, "check")
    mounted = [["mount", "-t", "proc", "proc", f"{root}/proc"]]
    mounted.append(["mount", "--bind", "/dev", f"{root}/dev"])
    for command in mounted:
        subprocess.run(command, check=True)
    try:
        run(root, "/venv/bin/python", "-m", "tests.compatibility.tfx.pipeline", "/pipeline")
    finally:
        for command in mounted:
            subprocess.run(["umount", command[-1]], check=True)


if __name__ == "__main__":
    main()
