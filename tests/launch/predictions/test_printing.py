"""The lines of `tftpu predict`."""

import numpy as np

from tftpu.input_pipelines.formats import results
from tftpu.launch.predictions import printing


def test_few_predictions_are_printed_without_long_lists(capsys):
    rows: list = []
    encode = printing.collect_rows(results.jsonl, rows)
    texts = {"file": ["ä", "b"], "record": [0, 1]}
    logits = np.zeros((2, 10), np.float32)
    columns = {**texts, "class": [1, 0], "top5_classes": np.zeros((2, 5), int), "logits": logits}
    assert encode(columns, {1: "no text"}) == results.jsonl(columns, {1: "no text"})
    printing.print_rows(rows)
    assert capsys.readouterr().out.splitlines() == [
        '{"file": "ä", "record": 0, "class": 1, "top5_classes": [0, 0, 0, 0, 0]}',
        '{"file": "b", "record": 1, "error": "no text"}',
    ]
    printing.print_rows([*results.iterate_rows({**texts, "logits": logits[:, :2]}, {})])
    assert capsys.readouterr().out.startswith('{"file": "ä", "record": 0, "logits": [0.0, 0.0]}\n')
    printing.print_rows([*results.iterate_rows({**texts, "logits": np.zeros((2, 3, 7))}, {})])
    assert not capsys.readouterr().out


def test_progress_says_what_is_there_and_what_is_left(capsys, monkeypatch):
    times = iter([0.0, 4.0, 11.0, 12.0])
    monkeypatch.setattr(printing.time, "monotonic", lambda: next(times))
    progress = printing.ProgressPrinter()
    for done in (100, 200, 650, 1000):
        progress(done, 1000)
    assert capsys.readouterr().out.splitlines() == [
        "100 of 1,000 records are there already",
        "650 of 1,000 records  50/s  7 s left",
    ]


def test_complete_predictions_are_said_to_be_there(capsys):
    printing.ProgressPrinter()(0, 5)
    assert not capsys.readouterr().out
    printing.ProgressPrinter()(5, 5)
    assert capsys.readouterr().out == "5 of 5 records are there already\n"
