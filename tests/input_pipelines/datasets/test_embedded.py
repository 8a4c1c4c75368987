"""The embedded data sets: prepared quietly on first use, then read without TFDS."""

import subprocess
import sys

import numpy as np
import pytest

from tests.support import warm
from tftpu import input_pipelines
from tftpu.errors import UserError
from tftpu.input_pipelines.datasets import embedded, tfds
from tftpu.input_pipelines.sources import Images


@pytest.mark.medium
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_digits_read_without_tfds_equal_those_that_tfds_reads(split):
    expected = tfds.load_split(tfds.open_builder("digits", None), split)
    found = embedded.load_split("digits", None, split)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        assert np.array_equal(found[name], values)


@pytest.mark.medium
def test_the_python_source_read_without_tfds_equals_that_of_tfds():
    expected = tfds.load_split(tfds.open_builder("python_source", None), "test")
    found = embedded.load_split("python_source", None, "test")
    assert found["text"].tolist() == expected["text"].tolist()


@pytest.mark.parametrize("split", ["train[:50%]", "train+test", "tests"])
def test_tfds_reads_splits_other_than_complete_ones(split):
    tfds.open_builder("digits", None)
    assert embedded.load_split("digits", None, split) is None


def test_a_slice_of_a_split_is_read_all_the_same():
    data = Images("digits", image_size=8, channels=1, train_split="train[:50%]")
    assert input_pipelines.training(data).count == pytest.approx(1437 / 2, abs=1)


@pytest.mark.medium
def test_preparing_prints_one_line_and_no_progress_bars(tmp_path, capfd):
    data = Images("digits", data_dir=str(tmp_path), image_size=8, channels=1)
    assert embedded.load_split("digits", str(tmp_path), "train") is None
    assert input_pipelines.training(data).count == 1437
    out, err = capfd.readouterr()
    assert out.splitlines() == [f"Preparing the data set 'digits' in {tmp_path}/digits/1.0.0"]
    assert "Generating" not in err and "%|" not in err
    assert len(embedded.load_split("digits", str(tmp_path), "train")["label"]) == 1437


def test_a_folder_of_texts_is_not_taken_for_a_place_to_prepare_others_in(tmp_path):
    (tmp_path / "mine.txt").write_text("My own text.")
    with pytest.raises(UserError, match=r"such as mine.txt, and not the data set 'python_source'"):
        tfds.open_builder("python_source", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_programs_that_others_published_are_not_downloaded(tmp_path):
    for name in ("huggingface:someone/data", "someone:data/config", "kaggle:data:1.0.0"):
        with pytest.raises(UserError, match="TFDS would download and run another author's program"):
            tfds.open_builder(name, str(tmp_path))


@pytest.mark.slow
def test_processes_that_start_together_prepare_a_data_set_once(tmp_path):
    code = (
        "import sys\nfrom tftpu.input_pipelines.datasets import tfds\n"
        f"builder = tfds.open_builder('digits', {str(tmp_path)!r})\n"
        "print(builder.info.splits['test'].num_examples)\n"
    )
    command = [sys.executable, "-c", code]
    both = [warm.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(process.communicate()[0].splitlines() for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert said[0] == ["360"] and said[1][0].startswith("Preparing") and said[1][1:] == ["360"]


@pytest.mark.slow
def test_a_prepared_data_set_is_read_without_importing_tfds():
    tfds.open_builder("digits", None)
    code = (
        "import sys\n"
        "from tftpu import input_pipelines\n"
        "from tftpu.input_pipelines.sources import Images\n"
        "data = Images('digits', image_size=8, channels=1)\n"
        "print(input_pipelines.training(data).count, 'tensorflow_datasets' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1437 False"
