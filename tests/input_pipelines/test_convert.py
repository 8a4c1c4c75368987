"""`tftpu data convert` and `verify`: all of a source, shuffled; the same bytes come what may."""

import csv
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tftpu.errors import UserError
from tftpu.input_pipelines.convert import beam, converter, packing, parts, verify
from tftpu.input_pipelines.convert.converter import Conversion
from tftpu.input_pipelines.formats import manifest
from tftpu.input_pipelines.reading.permutation import Permutation
from tftpu.launch import main as command_line


def silent(*_):
    pass


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def examples(folder, split="train") -> list[list[tf.train.Example]]:
    """Read by TensorFlow: a list for each shard, in the manifest's order."""
    found = manifest.read(str(folder))
    return [
        [
            tf.train.Example.FromString(record)
            for record in tf.data.TFRecordDataset(
                found.path(shard), found.compression
            ).as_numpy_iterator()
        ]
        for shard in found.shards(split)
    ]


def one(example: tf.train.Example, name: str) -> bytes | int:
    """The value of a feature that has one."""
    feature = example.features.feature[name]
    return (feature.bytes_list.value or feature.int64_list.value)[0]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """60 images of three classes, no two the same."""
    root = tmp_path_factory.mktemp("pictures")
    for number in range(60):
        folder = root / ["cat", "dog", "owl"][number % 3]
        folder.mkdir(exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (9, 8, 3), np.uint8)
        (folder / f"{number}.png").write_bytes(tf.io.encode_png(pixels).numpy())
    return root


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(parts, "PART_EXAMPLES", 7)
    monkeypatch.setattr(parts, "PART_BYTES", 2000)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 5000), seed=st.integers(-(2**40), 2**70))
def test_a_permutation_has_every_number_once_and_goes_back(count, seed):
    places = np.arange(count)
    there = Permutation(count, seed).forward(places)
    assert sorted(there.tolist()) == list(range(count))
    assert Permutation(count, seed).back(there).tolist() == places.tolist()


def test_a_permutation_of_very_many_is_worked_out_place_by_place():
    places = np.array([0, 1, 10**15 - 1])
    permutation = Permutation(10**15, 3)
    assert permutation.back(permutation.forward(places)).tolist() == places.tolist()
    # What is far apart has nothing to do with where it came from.
    values = Permutation(10_000, 0).forward(np.arange(10_000))
    assert abs(np.corrcoef(values, np.arange(10_000))[0, 1]) < 0.03
    assert (Permutation(10_000, 1).forward(np.arange(10_000)) == values).mean() < 0.01


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), max_size=12),
    context=st.integers(1, 12),
)
def test_packing_predicts_every_token_but_the_first_of_a_document_once(lengths, context):
    # Every token tells its document and its place in it.
    documents = [np.arange(n, dtype=np.int32) + 1000 * (d + 1) for d, n in enumerate(lengths)]
    predicted = Counter()
    sequences = list(packing.pack(documents, context))
    for tokens, segments in sequences:
        assert tokens.shape == segments.shape == (context + 1,)
        places = packing.positions(segments)
        for i in range(context):
            if segments[i] == segments[i + 1] > 0:
                assert tokens[i + 1] == tokens[i] + 1
                assert places[i + 1] == places[i] + 1
                predicted[int(tokens[i + 1])] += 1
            elif segments[i + 1]:
                assert places[i + 1] == 0
    wanted = [t for document in documents for t in document[1:].tolist()]
    assert predicted == Counter(wanted)
    padding = sum((segments == 0).sum() for _, segments in sequences)
    assert padding <= context


def test_a_folder_of_images_becomes_balanced_shuffled_shards(pictures, tmp_path):
    conversion = Conversion(f"images:{pictures}", str(tmp_path), min_shards=8)
    made = converter.run(conversion, workers=1, say=silent)
    assert made == manifest.read(str(tmp_path))
    assert made.about["classes"] == ["cat", "dog", "owl"]
    shards = examples(tmp_path)
    assert [len(shard) for shard in shards] == [s.examples for s in made.shards("train")]
    assert {len(shard) for shard in shards} == {7, 8}
    found = [(one(e, "image"), one(e, "label")) for s in shards for e in s]
    images = {
        path.read_bytes(): label
        for label, name in enumerate(["cat", "dog", "owl"])
        for path in (pictures / name).iterdir()
    }
    assert dict(found) == images
    assert len(found) == 60
    # Shuffled over all: neighbours in a shard come from anywhere.
    order = [list(images).index(image) for image, _ in found]
    assert np.abs(np.diff(order)).mean() > 12
    assert verify.run(str(tmp_path), workers=1)[1] == []
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_shards_are_of_the_size_that_was_asked_for(pictures, tmp_path):
    total = sum(path.stat().st_size for path in pictures.rglob("*.png"))
    converter.run(
        Conversion(f"images:{pictures}", str(tmp_path), shard_mb=total / 6 / 2**20),
        workers=1,
        say=silent,
    )
    sizes = [shard.bytes for shard in manifest.read(str(tmp_path)).shards("train")]
    assert 5 <= len(sizes) <= 8
    assert max(sizes) < 1.3 * min(sizes)


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_the_bytes_do_not_depend_on_who_makes_them(pictures, tmp_path, compression):
    """One process and a Beam job; again does nothing; another seed is another order."""

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
    """Converts in a child that is killed after so many seconds; whether it was before the end."""
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
        # A few kills each, so that all phases are hit, the last ones too.
        while killed(conversion(f"{number}"), draw.uniform(0, seconds / 2)):
            kills += 1
        assert content(tmp_path / f"{number}") == whole


def test_half_a_conversion_of_other_options_is_not_gone_on_with(pictures, tmp_path, monkeypatch):
    def conversion(folder, seed):
        return Conversion(f"images:{pictures}", str(tmp_path / folder), seed=seed, min_shards=4)

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(converter, "publish", lambda *_: 1 / 0)
        converter.run(conversion("half", 1), workers=1, say=silent)
    converter.run(conversion("half", 2), workers=1, say=silent)
    converter.run(conversion("whole", 2), workers=1, say=silent)
    assert content(tmp_path / "half") == content(tmp_path / "whole")


def test_two_splits_that_are_converted_at_once_are_both_there(pictures, tmp_path):
    """The one that begins first ends last, and neither touches what the other writes."""
    output = tmp_path / "out"
    test = Conversion(f"images:{pictures}", str(output), parts.Options(split="test"))
    train = dataclasses.replace(test, options=parts.Options(split="train"))
    half = output / ".train-00000-of-00001.tfrecord.1.tmp"

    def meanwhile(said: str) -> None:
        if "examples" in said:
            half.write_bytes(b"")
            converter.run(test, workers=1, say=silent)
            assert half.exists()

    converter.run(train, workers=1, say=meanwhile)
    assert set(manifest.read(str(output)).splits) == {"test", "train"}
    assert verify.run(str(output), workers=1)[1] == []


def test_a_conversion_waits_for_another_process_that_makes_the_same(pictures, tmp_path):
    conversion = Conversion(f"images:{pictures}", str(tmp_path))
    code = (
        "import sys, time\nfrom tftpu import files\n"
        "with files.claim(sys.argv[1]):\n"
        "    print('held', flush=True)\n    sys.stdin.readline()\n"
    )
    holder = subprocess.Popen(
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
    assert "Another process converts the same" in said[0]
    assert manifest.read(str(tmp_path)).examples("train") == 60


def test_text_is_tokenised_once_packed_and_reads_back(tmp_path):
    rows = [{"text": f"Zeile {n}: ä{'x' * (n % 50)}"} for n in range(200)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    for name in ("b", "c"):
        (tmp_path / f"{name}.jsonl").write_text("")
    options = parts.Options(context=32)
    source = f"text:{tmp_path}/*.jsonl"
    conversion = Conversion(source, str(tmp_path / "out"), options, min_shards=3)
    made = converter.run(conversion, workers=1, say=silent)
    assert made.about["vocabulary"] == 256
    predicted = Counter()
    for shard in examples(tmp_path / "out"):
        for example in shard:
            tokens = np.frombuffer(one(example, "tokens"), np.uint8)
            segments = np.frombuffer(one(example, "segments"), np.uint16)
            predicted.update(tokens[1:][(segments[1:] == segments[:-1]) & (segments[1:] > 0)])
    assert predicted == Counter(b for row in rows for b in row["text"].encode()[1:])


def test_a_tokenizer_of_hugging_face_and_its_end_of_text(tmp_path):
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "<end>": 2, "?": 3}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = str(tmp_path / "tokenizer.json")
    tokenizer.save(path)
    tokens, vocabulary = packing.tokenizer(path, "<end>")
    assert vocabulary == 4
    assert tokens("b a c").tolist() == [1, 0, 3, 2]
    with pytest.raises(UserError, match="no token '</s>'"):
        packing.tokenizer(path, "</s>")
    with pytest.raises(UserError, match="cannot be read"):
        packing.tokenizer(str(tmp_path / "none.json"))


def test_a_tfds_data_set_split_by_split_and_cut_anew(tmp_path):
    from sklearn.datasets import load_digits

    output = str(tmp_path / "digits")
    for split in ("train", "test"):
        options = parts.Options(split=split)
        converter.run(Conversion("tfds:digits", output, options, min_shards=3), 1, say=silent)
    found = manifest.read(output)
    assert {split: found.examples(split) for split in found.splits} == {"train": 1437, "test": 360}
    again = Conversion(f"tfrecord:{output}", str(tmp_path / "again"), min_shards=5, seed=9)
    converter.run(again, workers=1, say=silent)
    converter.run(
        Conversion(f"tfrecord:{output}", again.output, parts.Options(split="test")), 1, say=silent
    )
    for folder in (output, again.output):
        labels = Counter()
        pixels = 0
        for split in ("train", "test"):
            for shard in examples(folder, split):
                for example in shard:
                    labels[one(example, "label")] += 1
                    pixels += tf.io.decode_png(one(example, "image")).numpy().sum(dtype=int)
        digits = load_digits()
        assert labels == Counter(digits.target.tolist())
        assert pixels == pytest.approx((digits.images * 255 / 16).round().sum(), rel=1e-5)


def test_slices_of_a_split_become_splits_of_their_own(tmp_path):
    for split in ("train[:90%]", "validation=train[90%:]"):
        options = parts.Options(split=split)
        converter.run(Conversion("tfds:digits", str(tmp_path), options), 1, say=silent)
    found = manifest.read(str(tmp_path))
    assert {s: found.examples(s) for s in found.splits} == {"train": 1293, "validation": 144}
    images = [
        one(e, "image") for s in found.splits for shard in examples(tmp_path, s) for e in shard
    ]
    assert len(set(images)) > 1400  # a few digits were drawn alike


def test_an_index_of_images_with_class_names(pictures, tmp_path):
    files = sorted(pictures.rglob("*.png"))
    for name, suffix in (("a", "csv"), ("b", "jsonl")):
        path = pictures / f"{name}.{suffix}"
        rows = [{"image": str(p.relative_to(pictures)), "label": p.parent.name} for p in files]
        if suffix == "csv":
            with open(path, "w", newline="", encoding="utf-8-sig") as file:  # as Excel does
                writer = csv.DictWriter(file, ["image", "label"])
                writer.writeheader()
                writer.writerows(rows)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        made = converter.run(Conversion(f"index:{path}", str(tmp_path / name)), 1, say=silent)
        path.unlink()
        assert made.about["classes"] == ["cat", "dog", "owl"]
        assert made.examples("train") == 60
    assert content(tmp_path / "a").keys() == content(tmp_path / "b").keys()


def spoil(path: Path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("missing", r"train-00001-of-00003.tfrecord is missing"),
        ("cut", r"train-00001-of-00003.tfrecord: record \d+ is corrupt: the file ends"),
        ("bit", r"train-00001-of-00003.tfrecord: record \d+ is corrupt: the checksum"),
        ("other", r"is not the file that the manifest was written for"),
        ("image", r"record 2 of .*train-00001-of-00003.tfrecord: .*(PNG|decode)"),
        ("class", r"record 2 of .*train-00001-of-00003.tfrecord: .*not in \[0, 3\)"),
        ("count", r"train-00001-of-00003.tfrecord has 19 records, and 20"),
    ],
)
def test_verify_names_the_file_and_the_record(pictures, tmp_path, capsys, what, named):
    from tftpu.input_pipelines.formats import example_proto, tfrecord

    output = str(tmp_path)
    made = converter.run(Conversion(f"images:{pictures}", output, min_shards=3), 1, say=silent)
    path = tmp_path / "train-00001-of-00003.tfrecord"
    inside = [record for _, record in tfrecord.records(str(path))]
    if what == "missing":
        path.unlink()
    elif what == "cut":
        spoil(path, lambda data: data[:-30])
    elif what == "bit":
        spoil(path, lambda data: data[:900] + bytes([data[900] ^ 4]) + data[901:])
    elif what == "other":
        spoil(path, lambda data: (tmp_path / "train-00000-of-00003.tfrecord").read_bytes())
    elif what == "count":
        tfrecord.write(str(path), inside[:-1])
    else:
        features = {**made.features, "label": manifest.Feature("int32")}
        bad = {"image": b"\x89PNG\r\n\x1a\nno image" if what == "image" else inside_png(pictures)}
        bad["label"] = 3 if what == "class" else 0
        inside[2] = example_proto.encode(bad, features)
        tfrecord.write(str(path), inside)
    assert command_line.main(["data", "verify", output, "--workers=1"]) == 2
    assert re.search(named, capsys.readouterr().out)


def inside_png(pictures: Path) -> bytes:
    return next(pictures.rglob("*.png")).read_bytes()


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("image:x", "Did you mean 'images'?"),
        ("images", "KIND:WHAT"),
        ("images:/nowhere", "no folders of images"),
        ("index:/nowhere.csv", "cannot be read"),
        ("text:/nowhere/*.txt", "There is nothing in"),
        ("tfds:digitz", "Did you mean 'digits'?"),
        ("tfrecord:/nowhere", "There is no data set in"),
    ],
)
def test_a_source_that_is_not_there_is_a_sentence(tmp_path, capsys, source, sentence):
    arguments = ["data", "convert", f"--source={source}", f"--output={tmp_path}/out"]
    assert command_line.main(arguments) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.strip().splitlines()) == 1


def test_mistakes_of_a_source_name_the_file_and_the_line(pictures, tmp_path):
    def fails(source, match, **options):
        conversion = Conversion(source, str(tmp_path / "out"), parts.Options(**options))
        with pytest.raises(UserError, match=match):
            converter.run(conversion, workers=1, say=silent)

    (tmp_path / "a.csv").write_text("image,label\nno.png,1\n")
    fails(f"index:{tmp_path}/a.csv", r"Record 1 of .*a.csv: there is no image no.png")
    (tmp_path / "b.csv").write_text("file,label\nno.png,1\n")
    fails(f"index:{tmp_path}/b.csv", r"Record 1 of .*b.csv has no 'image'")
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n{"text": 1}\n')
    fails(f"text:{tmp_path}/c.jsonl", r"at byte 14 of .*c.jsonl: there is no text in the field")
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\nno\n')
    fails(f"text:{tmp_path}/d.jsonl", r"at byte 14 of .*d.jsonl is no JSON")
    (tmp_path / "e.txt").write_bytes(b"\xff")
    fails(f"text:{tmp_path}/e.txt", r"e.txt is not UTF-8")
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "1.jpg").write_bytes(b"GIF")
    fails(f"images:{tmp_path}/images", r"cat/1.jpg is neither a JPEG nor a PNG")
    fails("tfds:digits", "no feature 'labels'", features=("labels",))


def test_a_folder_that_holds_something_else_is_left_alone(pictures, tmp_path):
    conversion = Conversion(f"images:{pictures}", str(tmp_path))
    converter.run(conversion, workers=1, say=silent)
    before = content(tmp_path)
    with pytest.raises(UserError, match="another 'train' split already"):
        converter.run(Conversion(f"images:{pictures}", str(tmp_path), seed=5), 1, say=silent)
    with pytest.raises(UserError, match="other features"):
        options = parts.Options(split="test")
        converter.run(Conversion("tfds:digits", str(tmp_path), options), 1, say=silent)
    assert content(tmp_path) == before
    with pytest.raises(UserError, match="too few for --min_shards=61"):
        other = Conversion(f"images:{pictures}", str(tmp_path / "o"), min_shards=61)
        converter.run(other, workers=1, say=silent)


@pytest.mark.slow
def test_the_command_killed_with_its_workers_goes_on_and_leaves_no_process(tmp_path, monkeypatch):
    """`tftpu data convert` itself, two workers, killed once in each phase; and one worker."""
    pictures = tmp_path / "pictures" / "cat"
    pictures.mkdir(parents=True)
    for number in range(3000):
        pixels = np.random.default_rng(number).integers(0, 256, (9, 8, 3), np.uint8)
        (pictures / f"{number}.png").write_bytes(tf.io.encode_png(pixels).numpy())
    source = f"images:{pictures.parent}"
    arguments = (f"--source={source}", "--min_shards=20", "--workers=2")

    def start(output):
        command = [sys.executable, "-m", "tftpu.launch.main", "data", "convert", *arguments]
        return subprocess.Popen([*command, f"--output={output}"], start_new_session=True)

    def alive(group) -> bool:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        return True

    assert start(tmp_path / "whole").wait(timeout=300) == 0
    for waits_for in ("part-*.npy", "*.json"):
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


def test_workers_do_not_run_the_users_script_again(tmp_path):
    """A script without `if __name__ == "__main__"` converts too, with more than one process."""
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"{number} " * 1000)
    script = tmp_path / "script.py"
    script.write_text(
        "from tftpu.input_pipelines import convert, parts\n"
        "parts.PART_BYTES = 1000\n"
        f"conversion = converter.Conversion('text:{tmp_path}/*.txt', '{tmp_path}/out')\n"
        "print('begins')\n"
        "convert.run(conversion, workers=2)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("begins") == 1
    assert done.stdout.rstrip().endswith("is ready.")
