"""Runs a search on digits_resnet, and times the start of its trials.

    python -m tests.benchmarks.searching

Twenty trials of 100 steps search for a learning rate; the default one trains for as many steps.
Then a run of one step is started in turn as its own command and as a trial of a search, which
is forked from a process that has imported TensorFlow.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.searches import TINY, table
from tftpu.launch.run import result
from tftpu.launch.search.child import TrialProcess

_STEPS = ("--config.train.steps=100", "--config.train.eval_every=25")


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20, help="of the search")
    parser.add_argument("--rounds", type=int, default=7, help="starts of each kind")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _find(Path(folder), given.trials)
        _start(Path(folder), given.rounds)


def _find(folder: Path, trials_wanted: int) -> None:
    space = "--space=optimizer.learning_rate=log:1e-3..10"
    _tftpu("train", "--config=digits_resnet", *_STEPS, f"--workdir={folder / 'default'}")
    search = ("search", "--config=digits_resnet", *_STEPS, space, f"--trials={trials_wanted}")
    began = time.monotonic()
    _tftpu(*search, f"--workdir={folder / 'search'}")
    seconds = time.monotonic() - began
    trials = table(str(folder / "search"))
    complete = [trial for trial in trials if trial["value"] is not None and trial["state"] == 1]
    best = max(complete, key=lambda trial: trial["value"])
    default = (result.read(str(folder / "default")) or {})["best"]["value"]
    print(f"default learning rate: accuracy {default:.4f}")
    print(f"{best['overrides'][0]}: accuracy {best['value']:.4f}")
    print(f"{len(trials)} trials, {len(complete)} of them complete, in {seconds:.0f} s")


def _start(folder: Path, rounds: int) -> None:
    words = [word for word in TINY[1:] if not word.startswith("--space")]
    words += ["--config.train.steps=1", "--config.train.eval_every=0"]
    taken: dict[str, list[float]] = {"as a command": [], "as a trial": []}
    for number in range(rounds + 1):
        for kind, times in taken.items():
            run = str(folder / f"{number} {kind}")
            began = time.monotonic()
            if kind == "as a command":
                _tftpu("train", *words, f"--workdir={run}")
            else:
                child = TrialProcess([*words, f"--workdir={run}"], run, "loss", str(folder / "log"))
                child.connection.close()  # nobody waits for its report
                assert child.wait() == 0
            times += [time.monotonic() - began] if number else []  # the first one imports
    for kind, times in taken.items():
        spread = f"{min(times):.1f} to {max(times):.1f}"
        print(f"a run of one step, {kind}: {statistics.median(times):.1f} s ({spread})")


def _tftpu(*words: str) -> None:
    command = [sys.executable, "-m", "tftpu.launch.main", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
