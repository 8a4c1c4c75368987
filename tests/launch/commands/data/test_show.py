"""`tftpu data show`: the sheet of images, and text as it is packed."""

import io

import numpy as np
import pytest
from PIL import Image

from tests.support.data import photos
from tftpu import input_pipelines
from tftpu.config import DataConfig
from tftpu.input_pipelines.sources import Augment, StreamedImages, Tokens
from tftpu.launch.commands.data import show as data_show
from tftpu.launch.main import main
from tftpu.launch.settings import config_flags


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("flowers")
    for kind, level in (("crocus", 40), ("daisy", 120), ("tulip", 200)):
        (root / "train" / kind).mkdir(parents=True)
        for number in range(4):
            image = np.full((20, 30, 3), level + number, np.uint8)
            (root / "train" / kind / f"{number}.png").write_bytes(photos.encoded(image, "PNG"))
    return str(root)


def flowers(folder: str, **fields) -> StreamedImages:
    plain = Augment(crop=False, flip=False, **fields.pop("augment", {}))
    data = {"image_size": 16, "num_classes": 3, "global_batch_size": 12, "augment": plain, **fields}
    return StreamedImages(format="folder", data_dir=folder, **data)


@pytest.mark.medium
def test_the_sheet_shows_the_images_that_the_model_receives(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "show", "--config=digits_resnet", "--examples=8", "--step=3"]) == 0
    assert "8 examples from step 3 on are in digits_resnet_examples.png" in capsys.readouterr().out
    page = np.asarray(Image.open("digits_resnet_examples.png"))
    data = config_flags.load("digits_resnet", []).data
    images = next(input_pipelines.training(data).starting_at(3).as_numpy_iterator())[0]
    levels = np.rint((images[..., 0] + 1.2) * 64)
    for number in range(8):  # six in a row, of 8x8 pixels 24 wide; gaps of 12, lines of 17
        y, x = 29 + number // 6 * (192 + 17 + 12), 12 + number % 6 * (192 + 12)
        assert (page[y : y + 192 : 24, x : x + 192 : 24, 0] == levels[number]).all()


@pytest.mark.slow
@pytest.mark.parametrize("image_dtype", ["float32", "uint8"])
@pytest.mark.parametrize("space_to_depth", [False, True])
def test_images_look_the_same_for_every_input_format_of_the_model(
    folder, image_dtype, space_to_depth
):
    data = flowers(folder, image_dtype=image_dtype, space_to_depth=space_to_depth)
    images, labels = data_show.read_examples(data, 0, 0, 12)
    shown = data_show.to_pixels(data, images)
    assert shown.shape == (12, 16, 16, 3)
    names = [name for (name,) in data_show.format_captions(data, labels)]
    base = {"crocus": 40, "daisy": 120, "tulip": 200}
    assert all(0 <= image.mean() - base[name] <= 3.5 for image, name in zip(shown, names))
    assert set(names) == set(base)


@pytest.mark.slow
def test_a_mixed_image_lists_its_classes(folder):
    data = flowers(folder, augment={"mixup": 8.0}, image_dtype="uint8")
    images, labels = data_show.read_examples(data, 0, 0, 12)
    for image, lines in zip(images, data_show.format_captions(data, labels)):
        if len(lines) == 2:
            shares = dict(reversed(line.split()) for line in lines)
            levels = {"crocus": 41.5, "daisy": 121.5, "tulip": 201.5}
            expected = sum(float(share) * levels[name] for name, share in shares.items())
            assert image.mean() == pytest.approx(expected, abs=3)
            assert float(lines[0].split()[0]) >= float(lines[1].split()[0])


@pytest.mark.slow
def test_examples_are_the_first_from_the_step_on(folder):
    data = flowers(folder, global_batch_size=8, image_dtype="uint8", augment={"mixup": 0.4})
    batches = input_pipelines.training(data, 5).starting_at(2).take(3).as_numpy_iterator()
    whole = [np.concatenate(parts) for parts in zip(*batches)]
    for count in (1, 3, 8, 20):
        images, labels = data_show.read_examples(data, 5, 2, count)
        assert len(images) == count
        assert (images == whole[0][:count]).all() and (labels == whole[1][:count]).all()


def test_a_long_caption_is_cut_to_the_width_of_its_image():
    images = np.zeros((2, 200, 100, 1), np.uint8)
    page = Image.open(io.BytesIO(data_show.draw_sheet(images, [["a " * 100], ["b"]], "two")))
    below = np.asarray(page)[12 + 17 + 200 :, :, 0]
    assert below[:, 12 + 100 : 12 + 100 + 12].min() == 255  # nothing between the two
    assert below[:, 12 : 12 + 100].min() < 100


@pytest.mark.slow
def test_packed_text_is_printed_document_by_document(tmp_path):
    texts = ["the first one", "and the second", "a third that is longer than any other" * 30]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    data = Tokens(
        global_batch_size=1,
        context=2000,
        train_text=str(tmp_path / "*.txt"),
        eval_text=str(tmp_path / "*.txt"),
    )
    lines = data_show.format_documents(data, data_show.read_examples(data, 0, 0, 1))
    tokens = sum(map(len, texts))
    assert lines[0].startswith(
        f"row 0: 3 documents, 2,000 tokens, {2000 - tokens:,} of them padding"
    )
    for text in texts[:2]:
        at = lines.index(f"    | {text}")
        assert lines[at - 1].endswith(f", {len(text)} tokens")
    assert lines[-1].endswith("characters more") or lines[-3].endswith("characters more")


class Named(DataConfig):
    def class_names(self):
        return ["ham", "spam"]


def test_the_first_example_is_printed_shortened_with_the_name_of_its_class():
    batch = (np.arange(200).reshape(2, 100), np.array([[1], [0]]))
    assert data_show.format_first(Named(), batch) == [
        "the first example:",
        "  0: [ 0  1  2 ... 97 98 99]",
        "  1: [1]  (spam)",
    ]
    assert data_show.format_first(DataConfig(), {"x": np.array([0.5, 1])})[1:] == ["  x: 0.5"]
    assert data_show.format_first(Named(), (batch[0], np.array([2])))[-1] == "  1: 2"


def test_ranges_are_printed_for_other_data():
    batch = ({"x": np.array([[1.0, 5.0]]), "n": np.array([3])}, np.array([7]))
    assert data_show.format_ranges(batch)[0] == "0/n: int64 (1,), from 3 to 3"
    assert data_show.format_ranges(batch)[-1] == "1: int64 (1,), from 7 to 7"


def test_a_png_of_text_fails_with_a_clear_error(capsys):
    assert main(["data", "show", "--config=python_gpt", "--output=x.png"]) == 2
    assert "text is printed" in capsys.readouterr().err
