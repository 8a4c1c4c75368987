"""`tftpu data convert`, killed again and again: checks that the final bytes are the same.

    python -m tests.benchmarks.faults.killed_conversions              # 20 kills, two processes each
    python -m tests.benchmarks.faults.killed_conversions --kills=3 --images=500

Each run is the command itself, ended by SIGKILL at a random moment and repeated until it
completes; its folder is compared, byte for byte, with that of an undisturbed run.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make(root / "pictures", arguments.images)
        begin = time.monotonic()
        assert start(root, "whole").wait() == 0
        seconds = time.monotonic() - begin
        whole = content(root / "whole")
        kills, conversions = 0, 0
        while kills < arguments.kills:
            conversions += 1
            while True:
                child = start(root, f"{conversions}")
                left = kills < arguments.kills
                try:
                    # The start takes much of the time, so later moments matter more.
                    moment = draw.uniform(0.2, 1.2) * seconds
                    assert child.wait(timeout=moment if left else None) == 0
                    break
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
                    kills += 1
            assert content(root / f"{conversions}") == whole, "the bytes differ"
    print(
        f"{kills} kills in {conversions} conversions of {arguments.images} images to "
        f"{len(whole) - 1} shards, {seconds:.1f} s undisturbed: the same bytes every time"
    )


def make(folder: Path, images: int) -> None:
    """Writes small images of noise, of ten classes."""
    import tensorflow as tf

    for number in range(images):
        (folder / f"{number % 10}").mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (24, 24, 3), np.uint8)
        path = folder / f"{number % 10}" / f"{number}.png"
        path.write_bytes(tf.io.encode_png(pixels).numpy())


def start(root: Path, name: str) -> subprocess.Popen:
    command = (sys.executable, "-m", "tftpu.launch.main", "data", "convert", "--workers=2")
    source = (f"--source=images:{root}/pictures", f"--output={root}/{name}", "--min_shards=40")
    return subprocess.Popen([*command, *source], stdout=subprocess.DEVNULL)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


if __name__ == "__main__":
    main()
