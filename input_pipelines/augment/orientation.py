"""Reads the orientation in a JPEG's metadata with TensorFlow's operations only.

An exported model can therefore read it, too. XMP is used only if the EXIF data state no
orientation, as in Pillow.
"""

import tensorflow as tf

from tftpu.input_pipelines.tensors import Tensor

_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_TIFF = (b"MM\0*", b"II*\0", b"MM*\0", b"II\0*")  # the first bytes of EXIF data; II: little-endian
_TAG = 0x0112
_SHORTS, _LONGS = (3, 8), (4, 9, 13)  # TIFF's codes for whole numbers of two and four bytes
_ENTRY = 12  # bytes of an entry: tag 2, type 2, count 4, value 4
_IN_XMP = r'\C*?tiff:Orientation(?:="|>)([0-9])\C*'


def read_orientation(image: Tensor) -> Tensor:
    """Returns the orientation of a JPEG, from 1 to 8, (), int32.

    It is 1 (upright) if the metadata are missing or damaged.

    Args:
        image: the content of the file, a scalar string.
    """
    exif, xmp = _collect_metadata(image)
    # No branches: each would delay the start of every pass over a data set by some milliseconds.
    stated = tf.where(tf.strings.length(exif) > 0, _read_exif(exif), 0)
    found = tf.where(tf.equal(stated, 0), _read_xmp(xmp), stated)
    return tf.where((found >= 1) & (found <= 8), found, 1)


def _collect_metadata(image: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the EXIF data and the XMP in the segments before the pixels, or empty strings."""
    length = tf.strings.length(image)

    def is_before_pixels(at: Tensor, exif: Tensor, xmp: Tensor) -> Tensor:
        return at + 4 <= length

    def read_segment(at: Tensor, exif: Tensor, xmp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        head = tf.ensure_shape(_to_numbers(tf.strings.substr(image, at, 4)), (4,))
        begin, marker, high, low = tf.unstack(head)
        size = tf.maximum(high * 256 + low, 2)  # includes the two bytes of the size itself
        is_padding = (begin != 0xFF) | (marker == 0) | (marker == 0xFF)
        is_alone = (marker >= 0xD0) & (marker <= 0xD9)
        step = tf.where(is_padding, 1, tf.where(is_alone, 2, 2 + size))

        def keep_content() -> tuple[Tensor, Tensor]:
            content = tf.strings.substr(image, at + 4, size - 2)
            found = _remove_prefix(content, _XMP)
            newest = tf.where(tf.strings.length(found) > 0, found, xmp)
            return exif + _remove_prefix(content, _EXIF), newest

        is_metadata = (begin == 0xFF) & (marker == 0xE1)
        kept = tf.cond(is_metadata, keep_content, lambda: (exif, xmp))
        is_last = (begin == 0xFF) & (marker == 0xDA)  # the pixels follow
        return tf.where(is_last, length, at + step), *kept

    start = tf.constant(2), tf.constant(b""), tf.constant(b"")
    _, exif, xmp = tf.while_loop(is_before_pixels, read_segment, start)
    return exif, xmp


def _read_exif(exif: Tensor) -> Tensor:
    """Returns the orientation in EXIF data, (), int32; 0 if not stated, 1 if they are damaged."""
    start = tf.strings.substr(exif, 0, 4)
    little = tf.equal(tf.strings.substr(start, 0, 1), b"I")
    size = tf.strings.length(exif)
    numbers = tf.pad(_to_numbers(exif), [[0, 8 + _ENTRY]])

    def read_at(place: int, width: int, found: Tensor) -> Tensor:
        """Reads integers of `width` bytes at `place` of the last axis; int32, so they may wrap."""
        powers = [256**n for n in range(width)]
        places = tf.where(little, powers, powers[::-1])
        return tf.reduce_sum(found[..., place : place + width] * places, -1)

    first = read_at(4, 4, numbers)
    # Checked before it is used: if damaged, `first` may be negative, or beyond the end.
    is_inside = (first >= 0) & (first <= size)
    first = tf.where(is_inside, first, size)
    count = tf.minimum(read_at(0, 2, numbers[first:]), (size - first - 2) // _ENTRY)
    entries = numbers[first + 2 : first + 2 + _ENTRY * tf.maximum(count, 0)]
    entries = tf.reshape(entries, (-1, _ENTRY))
    kind = read_at(2, 2, entries)
    short, long = read_at(8, 2, entries), read_at(8, 4, entries)
    is_short, is_long = (_is_one_of(kind, kinds) for kinds in (_SHORTS, _LONGS))
    is_one = read_at(4, 4, entries) == 1
    value = tf.where(is_short & is_one, short, tf.where(is_long & is_one, long, 1))
    stated = tf.boolean_mask(value, read_at(0, 2, entries) == _TAG)
    last = tf.concat([[0], tf.where(stated == 0, 1, stated)], 0)[-1]
    known = tf.reduce_any(tf.equal(start, _TIFF))
    return tf.where(known, last, 1)


def _read_xmp(xmp: Tensor) -> Tensor:
    """Returns the orientation in XMP metadata, (), int32; 0 if it is not stated."""
    digits = tf.strings.regex_replace(xmp, _IN_XMP, r"\1", replace_global=False)
    digits = tf.where(tf.strings.regex_full_match(xmp, _IN_XMP), digits, b"0")
    return tf.strings.to_number(digits, tf.int32)


def _remove_prefix(text: Tensor, prefix: bytes) -> Tensor:
    """Returns a text without its prefix; an empty string if it does not begin with the prefix."""
    begins = tf.equal(tf.strings.substr(text, 0, len(prefix)), prefix)
    size = tf.maximum(tf.strings.length(text) - len(prefix), 0)
    rest = tf.strings.substr(text + prefix, len(prefix), size)  # substr fails beyond the end
    return tf.where(begins, rest, b"")


def _to_numbers(text: Tensor) -> Tensor:
    return tf.cast(tf.io.decode_raw(text, tf.uint8), tf.int32)


def _is_one_of(number: Tensor, numbers: tuple[int, ...]) -> Tensor:
    return tf.reduce_any(number[..., None] == tf.constant(numbers), -1)
