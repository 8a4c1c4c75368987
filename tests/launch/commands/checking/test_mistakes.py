"""Mistakes in the words of `tftpu preflight` and `tftpu plan`."""

import pytest

from tftpu.launch import main as command_line

DIGITS = ("preflight", "--config=digits_resnet")
PLAN = ("plan", "python_gpt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["preflight"], "needs CONFIG"),
        ([*DIGITS, "--slices=v9-8"], "is not a TPU slice"),
        ([*DIGITS, "--slices=v3-9"], "There is no v3-9"),
        ([*DIGITS, "--slices=,"], "--slices=, names no slice"),
        ([*DIGITS, "--slises=v3-8"], "Did you mean '--slices'?"),
        ([*DIGITS, "--price=v5e:1"], "--price"),
        ([*DIGITS, "--json"], "write --json=FILE"),
        ([*DIGITS, "--time_limit=0"], "--time_limit=0: the value must be a time"),
        ([*DIGITS, "--config.train.precision=mixed_float16"], "use mixed_bfloat16"),
        ([*DIGITS, "--html=."], "--html=. is a folder: name a file in it"),
        ([*DIGITS, "--json=/tmp"], "--json=/tmp is a folder"),
        (["plan"], "CONFIG"),
        ([*PLAN, "--budget=abc"], "--budget=abc: the value must be a number"),
        ([*PLAN, "--budget=0"], "--budget=0: give dollars, more than 0"),
        ([*PLAN, "--deadline=soon"], "--deadline=soon: the value must be a time"),
        ([*PLAN, "--budget=5", "--deadline=6h"], "--deadline=6h for the cheapest"),
        ([*PLAN, "--slices=v5e-9"], "There is no v5e-9"),
        ([*PLAN, "--slices=,"], "'' is not a TPU slice"),
        ([*PLAN, "--top=0"], "--top=0: the value must be a whole number of 1 or more"),
        ([*PLAN, "--price=v9=1"], "there is no generation 'v9'"),
        ([*PLAN, "--json=."], "--json=. is a folder"),
        (
            [*PLAN, "--slices=tpu7x-8", "--config.cluster.engine=tensorflow"],
            "TensorFlow does not support tpu7x",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_gives_one_clear_message_and_exit_code_2(
    arguments, message, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert command_line.main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said
