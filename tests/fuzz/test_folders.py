"""Folders of images as real ones are: every file is read with the right class, or named."""

import io
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image, ImageOps

from tests.support.data.conversions import examples, one
from tests.support.hostile.fuzzing import damaged, fuzzed, only_user_errors
from tftpu.input_pipelines.augment import decode
from tftpu.input_pipelines.convert import converter, splits, verify
from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.convert.readers.reader import ReadOptions
from tftpu.input_pipelines.formats import manifest

KINDS = {
    ".jpg": "JPEG", ".JPEG": "JPEG", ".jpe": "JPEG", ".jfif": "JPEG", ".png": "PNG", ".PNG": "PNG",
    ".gif": "GIF", ".bmp": "BMP", ".webp": "WEBP", ".tif": "TIFF", ".TIFF": "TIFF",
}  # fmt: skip
OTHERS = ["Thumbs.db", "desktop.ini", "labels.csv", "a.heic", "notes", "b.png.txt", "c.zip"]
HIDDEN = [".ipynb_checkpoints", "__MACOSX", ".git", "@eaDir"]
CLASSES = ["cat", "Dog", "großer hund", "a b", "01", "日本"]
SPLITS = ["train", "Val", "test"]


@st.composite
def pictures(draw) -> tuple[str, bytes]:
    """Draws the suffix and the bytes of an image; Pillow can read all of them."""
    suffix = draw(st.sampled_from(sorted(KINDS)))
    mode = draw(st.sampled_from(["RGB", "L", "P", "1", "RGBA", "CMYK", "I;16"]))
    allowed = {"JPEG": ("RGB", "L", "CMYK"), "GIF": ("RGB", "L", "P"), "WEBP": ("RGB", "RGBA")}
    allowed |= {"BMP": ("RGB", "L", "P", "1"), "PNG": ("RGB", "L", "P", "1", "RGBA", "I;16")}
    mode = mode if mode in allowed.get(KINDS[suffix], (mode,)) else "RGB"
    seed = draw(st.integers(0, 2**16))
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 9, 3), np.uint8)
    if mode == "I;16":
        image = Image.fromarray(pixels[..., 0].astype(np.uint16) << 8 | 3)
    else:
        image = Image.fromarray(pixels).convert(mode)
    exif = Image.Exif()
    if draw(st.booleans()):
        exif[0x0112] = draw(st.integers(1, 8))
    file = io.BytesIO()
    more = {"lossless": True, "exact": True} if suffix == ".webp" else {}
    image.save(file, KINDS[suffix], **more, **({"exif": exif} if exif else {}))
    return suffix, file.getvalue()


@st.composite
def folders(draw) -> tuple[dict[str, bytes], list[str]]:
    """Draws the files of a folder, and its splits; [] if its folders are classes."""
    found = draw(st.sampled_from([[], SPLITS[:1], SPLITS[:2], SPLITS]))
    files: dict[str, bytes] = {}
    classes = draw(st.lists(st.sampled_from(CLASSES), min_size=2, max_size=3, unique=True))
    for split in found or [""]:
        for name in classes if split in ("", "train") else classes[-1:]:
            inside = draw(st.sampled_from(["", "", "more", "a/b c"]))
            for number in range(draw(st.integers(1, 3))):
                suffix, data = draw(pictures())
                files[os.path.normpath(f"{split}/{name}/{inside}/{number}{suffix}").lstrip("/")] = (
                    data
                )
    places = [""] + [os.path.dirname(name) for name in files]
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.sampled_from(places))
        kind = draw(st.sampled_from(["other", "hidden", "hidden folder", "beside"]))
        if kind == "other":
            files[os.path.join(place, draw(st.sampled_from(OTHERS)))] = b"no image"
        elif kind == "hidden":
            files[os.path.join(place, "._x.png")] = b"no image"
        elif kind == "hidden folder":
            folder = os.path.join(place, draw(st.sampled_from(HIDDEN)))
            files[f"{folder}/train/cat/1.png"] = draw(pictures())[1]
        elif kind == "beside" and len(found) > 1:
            files["unlabeled/1.webp"] = draw(pictures())[1]
        elif kind == "beside":
            files[os.path.join(found[0] if found else "", "loose.jpg")] = draw(pictures())[1]
    return files, found


def by_pillow(data: bytes) -> np.ndarray:
    """Returns the upright pixels of an image in colours, of 16 bits the upper 8."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode.startswith("I"):
        return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, -1)
    return np.asarray(image.convert("RGB"))


def expected_of(files: dict[str, bytes], found: list[str]) -> dict[str, dict[str, str]]:
    """Returns the class of each image by its name, of each split: written for this test alone."""
    made: dict[str, dict[str, str]] = {}
    for name in files:
        parts = name.split("/")
        hidden = any(part.startswith(".") or part in HIDDEN for part in parts)
        split = parts.pop(0) if found else "train"
        if hidden or len(parts) < 2 or (found and split not in found):
            continue
        if os.path.splitext(name)[1].lower() in {kind.lower() for kind in KINDS}:
            made.setdefault(split, {})["/".join(parts)] = parts[0]
    return made


def named_in(said: list[str], of_splits: bool) -> set[str]:
    """Returns the files that lines such as "train: Left out 1 file, hidden: .x" name."""
    named = set()
    for split, left_out, rest in (line.partition("Left out") for line in said):
        top = split.replace(": ", "/") if of_splits else ""
        names = rest.split(": ", 1)[1].split(", ") if left_out else []
        named |= {top + name for name in names}
    return named


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@fuzzed(8, drawn=folders())
def test_every_file_of_a_folder_is_converted_or_named(tmp_path, drawn):
    files, found = drawn
    with tempfile.TemporaryDirectory(dir=tmp_path) as place:
        root, output = Path(place) / "photos", Path(place) / "out"
        for name, data in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
        (root / "empty").mkdir(exist_ok=True)
        said: list[str] = []
        options = ReadOptions(split="")
        for conversion in splits.plan_conversions(
            Conversion(f"images:{root}", str(output), options), say=said.append
        ):
            converter.run(conversion, workers=1, say=said.append)
        classes = manifest.read(str(output)).about["classes"]
        expected = expected_of(files, found)
        assert classes == sorted({name for split in expected.values() for name in split.values()})
        empty = {"empty"} - {name.split("/")[0] for name in files}
        assert named_in(said, bool(found)) == {*files, *empty} - {
            f"{split}/{name}" if found else name for split in expected for name in expected[split]
        }
        for split, wanted in expected.items():
            top = f"{split}/" if found else ""
            made = {
                one(e, "source").decode(): e for shard in examples(output, split) for e in shard
            }
            assert {name: classes[one(e, "label")] for name, e in made.items()} == wanted
            for name, example in made.items():
                pixels = decode.decode_image(one(example, "image"), 3).numpy()
                assert (pixels == by_pillow(files[top + name])).all()
        assert verify.run(str(output), workers=1)[1] == []


WHOLE = {
    kind: pictures().filter(lambda drawn, kind=kind: KINDS[drawn[0]] == kind)
    for kind in sorted(set(KINDS.values()))
}


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore")
@fuzzed(40, drawn=st.sampled_from(sorted(WHOLE)).flatmap(WHOLE.get), data=st.data())
def test_a_damaged_image_is_decoded_or_says_why(drawn, data):
    _, whole = drawn
    cut = data.draw(damaged(whole))
    with only_user_errors():
        why = decode.explain_failure(cut)
    assert why == "" or why.startswith(("is ", "has ", "cannot be decoded ("))
    assert "Traceback" not in why and "\n" not in why
