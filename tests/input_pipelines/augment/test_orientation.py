"""The orientation of a JPEG by TensorFlow's operations, against Pillow's reading."""

import io
import random

import pytest
import tensorflow as tf
from PIL import Image

from tests.support.data import photos
from tftpu.input_pipelines.augment import orientation

XMP = b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta xmlns:x='adobe:ns:meta/'>%s</x:xmpmeta>"
PLAIN = photos.encoded(photos.pixels(16, 16))

read = tf.function(orientation.read_orientation, input_signature=[tf.TensorSpec((), tf.string)])


def by_pillow(data: bytes) -> int:
    found = Image.open(io.BytesIO(data)).getexif().get(0x0112, 1)
    return found if found in range(1, 9) else 1


def segment(content: bytes) -> bytes:
    return b"\xff\xe1" + (len(content) + 2).to_bytes(2, "big") + content


def with_exif(number: int, endian: str) -> bytes:
    exif = Image.Exif()
    exif[0x010F], exif[0x0112], exif[0x011A] = "Camera", number, 72.0
    exif.endian = endian
    return photos.encoded(photos.pixels(16, 16), exif=exif)


def stated(number: int) -> dict[str, bytes]:
    """Returns files that state an orientation in each way."""
    attribute = segment(XMP % b'<a tiff:Orientation="%d"/><tiff:Orientation="3"/>' % number)
    element = segment(XMP % b"<tiff:Orientation>%d</tiff:Orientation>" % number)
    entry = b"\x01\x12\x00\x04\x00\x00\x00\x01" + number.to_bytes(4, "big") + bytes(4)
    long = b"Exif\0\0MM\0*\0\0\0\x08\x00\x01" + entry
    return {
        "EXIF data, little-endian": with_exif(number, "<"),
        "EXIF data, big-endian": with_exif(number, ">"),
        "EXIF data with a number of 4 bytes": PLAIN[:20] + segment(long) + PLAIN[20:],
        "EXIF data in two segments": PLAIN[:20]
        + segment(long[:16])
        + segment(b"Exif\0\0" + long[16:])
        + PLAIN[20:],
        "an attribute of XMP": PLAIN[:20] + attribute + PLAIN[20:],
        "an element of XMP, after padding": PLAIN[:20] + b"\xff\xff" + element + PLAIN[20:],
        "XMP, after EXIF data without": PLAIN[:20]
        + segment(b"Exif\0\0MM\0*\0\0\0\x08\0\0" + bytes(4))
        + element
        + PLAIN[20:],
    }


@pytest.mark.parametrize("number", range(10))
def test_an_orientation_is_that_of_pillow_however_it_is_stated(number):
    files = stated(number)
    assert {way: int(read(data)) for way, data in files.items()} == {
        way: by_pillow(data) for way, data in files.items()
    }
    if 1 <= number <= 8:
        assert {by_pillow(data) for data in files.values()} == {number}


@pytest.mark.medium
def test_damage_is_no_error_and_leaves_an_orientation():
    rng = random.Random(0)
    files = list(stated(6).values())
    for number in range(300):
        data = bytearray(files[number % len(files)])
        for _ in range(3):
            data[rng.randrange(2, 120)] = rng.choice([0, 1, 8, 127, 128, 255, rng.randrange(256)])
        cut = bytes(data[: rng.randrange(20, len(data))])
        assert 1 <= int(read(bytes(data))) <= 8 and 1 <= int(read(cut)) <= 8
