"""`tftpu data convert`: a complete, shuffled copy of a source, with reproducible bytes."""

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from tests.support import warm
from tests.support.data.conversions import content, examples, one, silent
from tftpu.errors import UserError
from tftpu.input_pipelines.convert import beam, converter, publishing, verify
from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.convert.readers.reader import ReadOptions
from tftpu.input_pipelines.formats import manifest

pytestmark = pytest.mark.usefixtures("small_parts")


@pytest.mark.medium
def test_a_folder_of_images_becomes_balanced_shuffled_shards(pictures, tmp_path):
    conversion = Conversion(f"images:{pictures}", str(tmp_path), min_shards=8)
    made = converter.run(conversion, workers=1, say=silent)
    assert made == manifest.read(str(tmp_path))
    assert made.about["classes"] == ["cat", "dog", "owl"]
    shards = examples(tmp_path)
    assert [len(shard) for shard in shards] == [s.examples for s in made.list_shards("train")]
    assert {len(shard) for shard in shards} == {7, 8}
    found = [(one(e, "image"), one(e, "label")) for s in shards for e in s]
    images = {
        path.read_bytes(): label
        for label, name in enumerate(["cat", "dog", "owl"])
        for path in (pictures / name).iterdir()
    }
    assert dict(found) == images
    assert len(found) == 60
    # Shuffled over the whole source: neighbours in a shard come from anywhere.
    order = [list(images).index(image) for image, _ in found]
    assert np.abs(np.diff(order)).mean() > 12
    assert verify.run(str(tmp_path), workers=1)[1] == []
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.medium
def test_shards_have_the_requested_size(pictures, tmp_path):
    total = sum(path.stat().st_size for path in pictures.rglob("*.png"))
    converter.run(
        Conversion(f"images:{pictures}", str(tmp_path), shard_mb=total / 6 / 2**20),
        workers=1,
        say=silent,
    )
    sizes = [shard.bytes for shard in manifest.read(str(tmp_path)).list_shards("train")]
    assert 5 <= len(sizes) <= 8
    assert max(sizes) < 1.3 * min(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_the_bytes_do_not_depend_on_the_machine_that_makes_them(pictures, tmp_path, compression):
    """One process equals a Beam job; a second run does nothing; another seed is another order."""

    def conversion(folder, seed=1):
        output = str(tmp_path / folder)
        source = f"images:{pictures}"
        return Conversion(source, output, seed=seed, min_shards=4, compression=compression)

    converter.run(conversion("one"), workers=1, say=silent)
    beam.run(conversion("beam"), ["--runner=DirectRunner"])
    whole = content(tmp_path / "one")
    assert len(whole) == 5
    assert content(tmp_path / "beam") == whole
    said = []
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "one").iterdir()}
    converter.run(conversion("one"), workers=1, say=said.append)
    assert "already" in said[0]
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "one").iterdir()} == stamps
    converter.run(conversion("other", seed=2), workers=1, say=silent)
    assert content(tmp_path / "other") != whole


def killed(conversion: Conversion, delay: float) -> bool:
    """Converts in a child that is killed after a delay; returns whether it was still running."""
    pid = os.fork()
    if not pid:
        try:
            converter.run(conversion, workers=1, say=silent)
        finally:
            os._exit(0)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.slow
def test_a_conversion_killed_at_20_random_points_gives_the_same_bytes(pictures, tmp_path):
    def conversion(folder):
        return Conversion(f"images:{pictures}", str(tmp_path / folder), min_shards=9)

    start = time.monotonic()
    converter.run(conversion("whole"), workers=1, say=silent)
    seconds = time.monotonic() - start
    whole = content(tmp_path / "whole")
    draw, kills, number = random.Random(7), 0, 0
    while kills < 20:
        number += 1
        # A few kills each, so that all stages are hit, including the last ones. Ever later, since a
        # fork of a large process may take as long as a whole conversion.
        later = 0.0
        while killed(conversion(f"{number}"), later + draw.uniform(0, seconds / 2)):
            kills, later = kills + 1, later + seconds / 10
        assert content(tmp_path / f"{number}") == whole


@pytest.mark.medium
def test_a_partial_conversion_with_other_options_is_not_resumed(pictures, tmp_path, monkeypatch):
    def conversion(folder, seed):
        return Conversion(f"images:{pictures}", str(tmp_path / folder), seed=seed, min_shards=4)

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(publishing, "publish", lambda *_: 1 / 0)
        converter.run(conversion("half", 1), workers=1, say=silent)
    converter.run(conversion("half", 2), workers=1, say=silent)
    converter.run(conversion("whole", 2), workers=1, say=silent)
    assert content(tmp_path / "half") == content(tmp_path / "whole")


@pytest.mark.medium
def test_two_splits_converted_at_the_same_time_both_exist(pictures, tmp_path):
    """The first to start is the last to finish, and neither touches the other's files."""
    output = tmp_path / "out"
    test = Conversion(f"images:{pictures}", str(output), ReadOptions(split="test"))
    train = dataclasses.replace(test, options=ReadOptions(split="train"))
    half = output / ".train-00000-of-00001.tfrecord.1.tmp"

    def meanwhile(said: str) -> None:
        if "examples" in said:
            half.write_bytes(b"")
            converter.run(test, workers=1, say=silent)
            assert half.exists()

    converter.run(train, workers=1, say=meanwhile)
    assert set(manifest.read(str(output)).splits) == {"test", "train"}
    assert verify.run(str(output), workers=1)[1] == []


@pytest.mark.medium
def test_a_conversion_waits_for_another_process_that_makes_the_same(pictures, tmp_path):
    conversion = Conversion(f"images:{pictures}", str(tmp_path))
    code = (
        "import sys, time\nfrom tftpu.storage import locks\n"
        "with locks.locked(sys.argv[1]):\n"
        "    print('held', flush=True)\n    sys.stdin.readline()\n"
    )
    holder = warm.Popen(
        [sys.executable, "-c", code, str(tmp_path / ".converting-train")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    said = []

    def say(text: str) -> None:
        said.append(text)
        if "waiting" in text:
            holder.communicate("go\n")

    converter.run(conversion, workers=1, say=say)
    assert "Another process is making this conversion" in said[0]
    assert manifest.read(str(tmp_path)).count_examples("train") == 60


@pytest.mark.medium
def test_a_folder_with_other_data_is_left_unchanged(pictures, tmp_path):
    conversion = Conversion(f"images:{pictures}", str(tmp_path))
    converter.run(conversion, workers=1, say=silent)
    before = content(tmp_path)
    with pytest.raises(UserError, match="already holds a split 'train'"):
        converter.run(Conversion(f"images:{pictures}", str(tmp_path), seed=5), 1, say=silent)
    with pytest.raises(UserError, match="other features"):
        options = ReadOptions(split="test")
        converter.run(Conversion("tfds:digits", str(tmp_path), options), 1, say=silent)
    assert content(tmp_path) == before
    with pytest.raises(UserError, match="too few for min_shards=61"):
        other = Conversion(f"images:{pictures}", str(tmp_path / "o"), min_shards=61)
        converter.run(other, workers=1, say=silent)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": ReadOptions(split="../x")}, r"'\.\./x' cannot name the shards"),
        ({"options": ReadOptions(split="/x=train")}, "'/x' cannot name the shards"),
        ({"options": ReadOptions(split=".x")}, r"'\.x' cannot name the shards"),
        ({"options": ReadOptions(split="[:10]")}, "'' cannot name the shards"),
        ({"shard_mb": float("nan")}, "shard_mb is nan: it must be a number above 0"),
        ({"shard_mb": float("inf")}, "shard_mb is inf: it must be a number above 0"),
    ],
)
def test_an_option_that_is_not_allowed_writes_nothing(pictures, tmp_path, changes, message):
    conversion = Conversion(f"images:{pictures}", str(tmp_path / "out" / "here"))
    with pytest.raises(UserError, match=message):
        converter.run(dataclasses.replace(conversion, **changes), workers=1, say=silent)
    assert not list(tmp_path.iterdir())


def write_many_images(folder) -> str:
    """Writes images of several parts; returns their source."""
    pictures = folder / "pictures" / "cat"
    pictures.mkdir(parents=True)
    for number in range(3000):
        pixels = np.random.default_rng(number).integers(0, 256, (9, 8, 3), np.uint8)
        (pictures / f"{number}.png").write_bytes(tf.io.encode_png(pixels).numpy())
    return f"images:{pictures.parent}"


@pytest.mark.slow
def test_the_command_killed_with_its_workers_resumes_and_leaves_no_process(tmp_path, monkeypatch):
    """`tftpu data convert` itself, two workers, killed once in each stage; and one worker."""
    source = write_many_images(tmp_path)
    arguments = (f"--source={source}", "--min_shards=20", "--workers=2")

    def start(output):
        command = [sys.executable, "-m", "tftpu.launch.main", "data", "convert", *arguments]
        return warm.Popen([*command, f"--output={output}"], start_new_session=True)

    def alive(group) -> bool:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        return True

    assert start(tmp_path / "whole").wait(timeout=300) == 0
    for waits_for in ("part-*.json", "train-*.json"):
        child = start(tmp_path / "killed")
        staging = tmp_path / "killed" / ".converting-train"
        while not list(staging.glob(waits_for)):
            assert child.poll() is None
            time.sleep(0.01)
        child.kill()
        child.wait()
        deadline = time.monotonic() + 20
        while alive(child.pid):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert start(tmp_path / "killed").wait(timeout=300) == 0
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    assert verify.run(str(tmp_path / "killed"))[1] == []
    monkeypatch.undo()  # the size of a part
    alone = Conversion(source, str(tmp_path / "alone"), min_shards=20)
    converter.run(alone, workers=1, say=silent)
    assert content(tmp_path / "alone") == content(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True], ids=["heard", "ignored"])
def test_ctrl_c_ends_a_conversion_without_a_traceback_unless_it_is_ignored(tmp_path, ignored):
    """A shell without a terminal lets jobs in the background ignore it."""
    output = tmp_path / "out"
    arguments = (f"--source={write_many_images(tmp_path)}", f"--output={output}", "--workers=2")
    command = [sys.executable, "-m", "tftpu.launch.main", "data", "convert", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = ["env", f"--{'ignore' if ignored else 'default'}-signal=INT", *command]
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        while "parts to read" not in process.stdout.readline():
            assert process.poll() is None
        while not list(output.glob(".converting-train/part-*")):
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of its processes
        said = process.stdout.read()  # to the end of the last process
    assert process.returncode == (0 if ignored else 130), said
    assert ("tftpu: interrupted\n" in said) != ignored
    assert "Traceback" not in said


@pytest.mark.slow
def test_workers_do_not_run_the_users_script_again(tmp_path):
    """A script without `if __name__ == "__main__"` converts too, with more than one process."""
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"{number} " * 1000)
    script = tmp_path / "script.py"
    script.write_text(
        "from tftpu.input_pipelines.convert import converter\n"
        "from tftpu.input_pipelines.convert.conversion import Conversion\n"
        "from tftpu.input_pipelines.convert.readers import text\n"
        "text.PART_BYTES = 1000\n"
        f"conversion = Conversion('text:{tmp_path}/*.txt', '{tmp_path}/out')\n"
        "print('begins')\n"
        "converter.run(conversion, workers=2)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("begins") == 1
    assert done.stdout.rstrip().endswith("is ready.")
