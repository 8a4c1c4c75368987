"""Mistakes in `tftpu launch vertex-pipeline` are explained before anything is sent."""

import subprocess
import sys

import pytest

from tests.support.messages import check_message
from tests.support.vertex_pipelines import FLAGS, IMAGENET, SOURCE
from tftpu.launch import main
from tftpu.launch.cloud.vertex import pipeline_client

pytest.importorskip("kfp", reason="not beside TensorFlow 2.19, which holds protobuf too low")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--gate=accuracy"], "--gate=accuracy: 'accuracy' is not METRIC>=NUMBER"),
        (["--gate=accuracy>=high"], "in quotes"),
        (["--gate=acuracy>=0.9"], "has only loss, accuracy. Did you mean 'accuracy'?"),
        (["--predict=images:new"], "--predict=images:new is not in a bucket"),
        (["--predict=imges:gs://b/x"], "Did you mean 'images'?"),
        (["--predict=nonsense"], "has to be one of evaluation, training, images:…"),
        (["--convert_flags=--seed=1"], "give that, too"),
        ([*SOURCE, "--convert_flags=--sed=1"], "Did you mean '--seed'?"),
        ([*SOURCE, "--convert_flags=--output=x"], "has --output, which the pipeline sets"),
        ([*SOURCE, "--source=photos"], "--source=photos has to be one of images:…"),
        ([*SOURCE, "--config.data.data_dir=gs://b/x"], "both say where the data are"),
        (["--workdir=gs://b/it's"], "contains a quote or a backslash"),
        ([*SOURCE, "--source=images:photos"], "give images:gs://BUCKET/FOLDER"),
        (["--cron=daily"], "--cron='daily' needs five fields"),
        (["--workdir=runs/a"], "write gs://BUCKET/FOLDER"),
        (["--slice=v4-8"], "v4-8 is not a slice for custom jobs"),
        (["--slice=v6e-8"], "add --config.cluster.engine=jax"),
        (
            ["--source=images:gs://b/photos"],
            "Images of digits_resnet does not read them: give a config",
        ),
        ([*IMAGENET, "--source=images:gs://b/photos"], "add --config.data.format=tfrecord"),
        (["--timeout=soon"], "--timeout=soon: the value must be a time"),
    ],
)
def test_a_mistake_is_explained_before_anything_is_sent(capsys, monkeypatch, flags, says):
    monkeypatch.setattr(pipeline_client, "create_clients", pytest.fail)
    assert main.main(["launch", "vertex-pipeline", *FLAGS, *flags]) == 2
    check_message(capsys.readouterr().err, says)


def test_the_gate_is_required(capsys):
    assert main.main(["launch", "vertex-pipeline", "--config=a", "--workdir=gs://b/c"]) == 2
    assert "needs --gate=CONDITION (condition for exporting" in capsys.readouterr().err


def test_without_the_extra_it_names_the_command_that_installs_it():
    code = (
        "import sys; sys.modules['kfp'] = None; from tftpu.launch import main;"
        f"sys.exit(main.main(['launch', 'vertex-pipeline', *{FLAGS!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "run `pip install 'kfp" in done.stderr and done.stderr.count("\n") == 1
