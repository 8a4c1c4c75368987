"""Pictures of any size for an export: by its signature of files, and by the guide's function."""

import io
import json
import re
import runpy
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tensorflow as tf
from PIL import Image

from tests.support.data import photos
from tests.support.repository.checkout import ROOT
from tftpu.input_pipelines.augment import image_ops
from tftpu.input_pipelines.augment.settings import Augment
from tftpu.launch.main import main

CONFIG = """
from tftpu import Experiment, TrainConfig
from tftpu.input_pipelines.sources import Augment, StreamedImages
from tftpu.models.sizes import ResNet


def get_config():
    data = StreamedImages(
        format="folder", data_dir="FOLDER", image_size=33, num_classes=2, eval_split="train",
        global_batch_size=4, augment=Augment(eval_crop=0.8),
    )
    model = ResNet("tiny", blocks=(1, 1), width=8, stem="small", image_size=33, num_classes=2,
                   norm_batch=4)
    train = TrainConfig(steps=8, steps_per_loop=4, log_every=4)
    return Experiment(model=model, data=data, optimizer="adam", train=train)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    place = tmp_path_factory.mktemp("run")
    for seed, name in enumerate("abababab"):
        folder = place / "train" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{seed}.jpg").write_bytes(photos.encoded(photos.pixels(60, 70, seed)))
    (place / "tiny.py").write_text(CONFIG.replace("FOLDER", str(place)))
    words = [f"--config={place}/tiny.py", f"--workdir={place}/run"]
    assert main(["train", *words]) == 0
    return str(place / "run")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Files of odd sides: small and large, wide and tall, turned, grey, transparent."""
    folder = tmp_path_factory.mktemp("pictures")
    # The square is smaller than the model's size, larger, or decoded at 1/2, 1/4 and 1/8.
    for height, width in (20, 17), (33, 33), (71, 93), (131, 97), (211, 299), (331, 409):
        colours, name = photos.pixels(height, width, height), f"{folder}/{height}x{width}"
        files = {
            "whole.jpg": photos.encoded(colours, subsampling=0),
            "halved.jpg": photos.encoded(colours),
            "longer.jpg": photos.encoded(colours) + b"\0",  # decoded completely
            "grey.jpg": photos.encoded(colours[..., :1]),
            "plain.png": photos.encoded(colours, "PNG"),
            "clear.png": photos.encoded(np.dstack([colours, colours[..., 0]]), "PNG"),
        }
        for number in range(1, 9):
            exif = Image.Exif()
            exif[0x0112] = number
            files[f"turned{number}.jpg"] = photos.encoded(colours, exif=exif, subsampling=0)
        for kind, data in files.items():
            Path(f"{name}-{kind}").write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def predicted(run, pictures, tmp_path_factory) -> dict[str, list[float]]:
    to = tmp_path_factory.mktemp("predicted") / "out"
    words = [f"--input=images:{pictures}", f"--output={to}", "--outputs=logits"]
    assert main(["predict", run, *words]) == 0
    [shard] = to.glob("*.jsonl")
    rows = [json.loads(line) for line in shard.read_text().splitlines()]
    return {row["file"]: row["logits"] for row in rows}


@pytest.mark.slow
def test_a_saved_model_gives_files_the_logits_of_predict(run, predicted, tmp_path, capsys):
    assert main(["export", run, f"--output={tmp_path}/saved"]) == 0
    assert "image_bytes of the signature serving_bytes" in capsys.readouterr().out
    signatures = tf.saved_model.load(f"{tmp_path}/saved").signatures
    files = [Path(path).read_bytes() for path in predicted]
    assert len(files) == 6 * 14
    found = signatures["serving_bytes"](image_bytes=tf.constant(files))
    assert set(found) == {"logits", "class", "label"}
    expected = np.array(list(predicted.values()))
    np.testing.assert_allclose(found["logits"], expected, atol=1e-6 * np.abs(expected).max())
    assert np.ptp(expected, 0).min() > 1e-2 * np.abs(expected).max()  # pictures are told apart
    # Other formats are named, and no Python is needed by what is left.
    gif = io.BytesIO()
    Image.fromarray(photos.pixels(40, 40)).save(gif, "GIF")
    with pytest.raises(tf.errors.InvalidArgumentError, match="This model decodes only JPEG in g"):
        signatures["serving_bytes"](image_bytes=tf.constant([files[0], gif.getvalue()]))


@pytest.fixture(scope="module")
def read_image(tmp_path_factory):
    """The function of the guide, which states the differences that are measured here."""
    page = (ROOT / "docs/guides/exporting.md").read_text()
    block = page.partition('```python title="pictures.py"\n')[2].partition("```")[0]
    path = tmp_path_factory.mktemp("guide") / "pictures.py"
    path.write_text(block)
    return runpy.run_path(str(path))["read_image"]


@pytest.mark.slow
@pytest.mark.parametrize(("share", "size", "mode"), [(0.8, 64, "RGB"), (0.875, 33, "L")])
def test_the_function_of_the_guide_gives_the_pixels_of_evaluation(
    share, size, mode, pictures, read_image
):
    crop = image_ops.build_evaluation_crop(Augment(eval_crop=share), size, len(mode))
    most = dict.fromkeys(("exact", "turned", "halved", "png"), 0)
    for path in sorted(pictures.iterdir()):
        ours = crop({"image": tf.io.read_file(str(path))})["image"].numpy().astype(int)
        difference = np.abs(ours - read_image(path, size, share, mode)).max()
        weighed = "turned|halved|png" if mode == "L" else "turned|halved"  # colours, to grey
        kind = re.findall(weighed, path.name) or ["exact"]
        most[kind[0]] = max(most[kind[0]], difference)
    # The decoder of the pipeline does not read the colours beside the square.
    assert most["halved"] <= 10 and most["exact"] == 0
    assert most["turned"] <= 1 and most["png"] <= 1


@pytest.mark.slow
def test_an_export_that_is_given_what_it_returns_has_the_logits_of_predict(
    run, predicted, read_image, tmp_path, capsys
):
    assert main(["export", run, f"--output={tmp_path}/m.onnx"]) == 0
    said = capsys.readouterr().out
    [(size, share)] = re.findall(r"read_image\(path, size=(\d+), share=([\d.]+)\)", said)
    images = np.stack([read_image(path, int(size), float(share)) for path in predicted])
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    [logits] = session.run(["logits"], {"images": images})
    expected = np.array(list(predicted.values()))
    difference = np.abs(np.asarray(logits) - expected).max() / np.abs(expected).max()
    assert difference < 1e-3
