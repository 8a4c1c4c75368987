"""The records of `tftpu predict`."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import tftpu
from tests.support.data import data_sets
from tftpu.errors import UserError
from tftpu.input_pipelines.formats import manifest
from tftpu.input_pipelines.formats.manifest import Feature
from tftpu.input_pipelines.sources import StreamedImages
from tftpu.input_pipelines.unlabelled import UnlabelledRecords
from tftpu.launch.predictions.records import name_labels, open_records


@pytest.mark.parametrize(
    ("opened", "said"),
    [
        ("rows.csv", "--input=rows.csv: there is no file 'rows.csv'. Did you mean 'row.csv'?"),
        ("other", "Own.prediction() in line"),
        ("a text", "--input=a text: there is no file 'a text'. Own.prediction reads all of"),
        ("text:a", "--input=text:a: there is no file 'text:a'. Own.prediction reads all of"),
    ],
)
def test_an_input_that_does_not_exist_is_named_before_the_code_that_reads_it(
    opened, said, tmp_path, monkeypatch
):
    class Own(tftpu.DataConfig):
        def prediction(self, address, context):
            Path(opened).read_bytes()

    monkeypatch.chdir(tmp_path)
    (tmp_path / "row.csv").touch()
    given = "rows.csv" if opened == "other" else opened
    with pytest.raises(UserError) as refused:
        open_records(Own(), given, False, ())
    assert str(refused.value).startswith(said)


def test_a_kept_name_of_the_input_is_not_replaced_by_the_class_name_of_its_label():
    fields = {"label": np.array([1, 0]), "label_name": ["tabby", "poodle"]}
    records = UnlabelledRecords(2, "", list, range, [*fields], lambda _, kept: fields)
    named = name_labels(records, tftpu.DataConfig(), ["dog", "cat"])
    assert named.read_fields(range(2), [*fields]) == fields
    del fields["label_name"]
    found = named.read_fields(range(2), ["label"])
    assert found["label_name"] == ["cat", "dog"]


def test_a_kept_label_of_another_data_set_has_the_name_of_that_data_set(tmp_path):
    images = {"image": Feature("string", (), "image"), "label": Feature("int32", num_classes=3)}
    examples = [{"image": b"", "label": label} for label in (0, 2, 1)]
    found = data_sets.shards(tmp_path, images, {"train": [examples]})
    manifest.write(dataclasses.replace(found, about={"classes": ["ant", "bird", "cat"]}))
    given = {"format": "tfrecord", "data_dir": str(tmp_path / "x"), "num_classes": 2}
    data = StreamedImages(**given, first_class=1, global_batch_size=1)
    records, _ = open_records(data, f"tfrecord:{tmp_path}", False, ("label",))
    named = name_labels(records, data, ["bird", "cat"])
    assert named.read_fields(range(3), ["label"])["label_name"] == ["ant", "cat", "bird"]
