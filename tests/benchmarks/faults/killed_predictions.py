"""Predictions, killed again and again: checks that every record is predicted exactly once.

    python -m tests.benchmarks.faults.killed_predictions                 # 20 kills in each place
    python -m tests.benchmarks.faults.killed_predictions --kills=3 --devices=2

A process predicts on 1, 2 or 8 devices of this machine's CPU, into a folder or, on one device, into
a bucket on loopback behind TensorFlow's own `gs://`. It is ended by SIGKILL at a random moment of
its work, every third time in the middle of writing a shard, and started again until all is
predicted. The files of equal devices are compared byte for byte, those of others by their values.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np

RECORDS, PER_SHARD, BATCH = 40_000, 1_000, 256
TOLERANCE = 1e-5


def main() -> None:
    """Prints, for each place, how often it was killed and that nothing is lost or repeated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--devices", default="1,2,8,gs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", nargs=3, metavar=("OUTPUT", "DEVICES", "DIES"))
    given = parser.parse_args()
    if given.child:
        output, devices, dies = given.child
        predicted(output, int(devices), int(dies))
        return
    draw = random.Random(given.seed)
    values = {}
    for place in given.devices.split(","):
        with tempfile.TemporaryDirectory() as scratch, served(place, Path(scratch)) as where:
            values[place] = drill(place, where, given.kills, draw)
    first, *others = values.values()
    for place, found in zip([*values][1:], others):
        print(f"{place}: at most {np.abs(first - found).max():.1e} beside the first")
        assert np.abs(first - found).max() <= TOLERANCE


class Place:
    """A place that predictions are written to.

    Args:
        root: folder or bucket.
        environment: of the processes that write to it.
        content: returns the content of the files of a folder in it, by name.
    """

    def __init__(self, root: str, environment: dict[str, str], content):
        self.root, self.environment, self.content = root, environment, content


@contextlib.contextmanager
def served(place: str, scratch: Path) -> Iterator[Place]:
    """Yields a folder, or a bucket on loopback."""
    if place != "gs":

        def content(name: str) -> dict[str, bytes]:
            return {path.name: path.read_bytes() for path in (scratch / name).iterdir()}

        yield Place(str(scratch), {}, content)
        return
    from tests.support.fakes import gs_proxy

    with gs_proxy.serving(scratch) as (service, environment):

        def objects(name: str) -> dict[str, bytes]:
            found = [n for n in service.names() if n.startswith(f"{name}/")]
            return {n.rpartition("/")[2]: service.content(n) for n in found}

        yield Place("gs://bucket", environment, objects)


def drill(name: str, place: Place, kills: int, draw: random.Random) -> np.ndarray:
    """Returns the values of predictions that were killed, after comparing them with others."""
    devices = 1 if name == "gs" else int(name)
    begin = time.monotonic()
    assert start(place, "whole", devices).wait() == 0
    seconds = time.monotonic() - begin
    whole = shards(place.content("whole"))
    done = rounds = inside = 0
    while done < kills:
        rounds += 1
        while True:
            left = done < kills
            dies = draw.randrange(1, 12) if left and done % 3 == 2 else 0
            child = start(place, f"{rounds}", devices, dies)
            try:
                moment = draw.uniform(0.5, 1.0) * seconds if left and not dies else None
                code = child.wait(timeout=moment)
            except subprocess.TimeoutExpired:
                child.kill()
                code = child.wait()
            if code == 0:
                break
            assert code == -signal.SIGKILL, code
            done, inside = done + 1, inside + bool(dies)
        found = place.content(f"{rounds}")
        assert shards(found) == whole, "the bytes differ"
        left = [name for name in found if name.endswith(".tmp")]
        assert not left, f"parts of files are left: {left}"
    rows = [json.loads(line) for _, data in sorted(whole.items()) for line in data.splitlines()]
    assert [row["record"] for row in rows] == list(range(RECORDS))
    print(
        f"{name}: {done} kills, {inside} of them inside a write, in {rounds} predictions of "
        f"{RECORDS:,} records in {len(whole)} shards, {seconds:.1f} s undisturbed: every record "
        "once, the same bytes every time",
        flush=True,
    )
    return np.array([row["logits"] for row in rows])


def shards(content: dict[str, bytes]) -> dict[str, bytes]:
    """Returns the files of the predictions, after checking that they are those of the manifest."""
    found = {name: data for name, data in content.items() if name.startswith("predictions-")}
    listed = json.loads(content["manifest.json"])["shards"]
    assert sorted(found) == [shard["name"] for shard in listed]
    return found


def start(place: Place, name: str, devices: int, dies: int = 0) -> subprocess.Popen:
    """Starts a process that predicts, and kills itself in its nth write if `dies` is not 0."""
    words = ["--child", f"{place.root}/{name}", str(devices), str(dies)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.faults.killed_predictions", *words],
        env={**os.environ, **place.environment},
    )


def predicted(output: str, devices: int, dies: int) -> None:
    """Predicts images in memory with a model of weights that are always the same."""
    import keras

    import tftpu
    from tftpu import models
    from tftpu.config import DataContext
    from tftpu.inference.predict import Job, predict
    from tftpu.inference.prediction.outputs import build_columns
    from tftpu.input_pipelines import unlabelled
    from tftpu.input_pipelines.formats import results
    from tftpu.launch.settings.config_flags import load
    from tftpu.storage import files

    if dies:
        die_in(files, dies)
    images = np.random.default_rng(0).normal(size=(RECORDS, 8, 8, 1)).astype(np.float32)
    engine = tftpu.connect("none", devices if devices > 1 else None)
    with engine.scope():
        keras.utils.set_random_seed(0)
        model = models.build(load("digits_resnet", []).model)
        model.compile("sgd", "mse")
    records = unlabelled.from_arrays(images, DataContext(0, BATCH), "images")
    columns = build_columns(["logits"], False, None)
    job = Job(output, "jsonl", results.jsonl, columns, {}, records_per_shard=PER_SHARD)
    assert predict(tftpu.Trainer(model), records, job)


def die_in(files, dies: int) -> None:
    """Ends this process in the middle of the nth shard that it writes."""
    write_whole, begun = files.write_whole, []

    def dying(path, data):
        begun.append(path)
        if len(begun) - 1 == dies:  # the first is the plan
            return write_whole(path, halves(data))
        return write_whole(path, data)

    def halves(data: bytes) -> Iterator[bytes]:
        yield data[: len(data) // 2]
        os.kill(os.getpid(), signal.SIGKILL)

    files.write_whole = dying


if __name__ == "__main__":
    main()
