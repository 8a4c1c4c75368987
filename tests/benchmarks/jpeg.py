"""JPEG files to batches for a device: images per second of the pipeline and of its parts.

    python -m tests.benchmarks.jpeg [--turns=20] [--files=256]

Makes photographs of the size of ImageNet's (500 x 375, about 110 kB) in a folder for each class.
These contestants take turns on the same cores, in one run:

- `pipeline`: `StreamedImages` of the folder, as `tftpu train` reads it: shuffled, read, decoded and
  cropped at random in one step, resized to 224, flipped, in batches of uint8.
- `bare loop`: one thread per core reads files, decodes and crops them (fused), and resizes: one
  call of a compiled function per image; no shuffle, no flip, no batch.
- `bare graph`: the same as one compiled loop per core, without any Python in it.
- `keras`: `keras.utils.image_dataset_from_directory`, and in its `map` Keras's layers. Keras has no
  random resized crop: RandomCrop and RandomFlip of images resized to 256 stand in, which is less.

A turn begins with a fresh iterator and one batch that is not timed, so that no contestant works
ahead while others are timed. Prints medians over the turns, and medians of the ratios of each turn.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from tests.support.data import photos
from tftpu import input_pipelines
from tftpu.input_pipelines.sources import StreamedImages

SIZE, BATCH = 224, 64
CLASSES = 8
CORES = len(os.sched_getaffinity(0))


def make_files(folder: str, count: int) -> list[str]:
    """Writes photographs to train/CLASS/NUMBER.jpg; half of them upright."""
    paths = []
    for number in range(count):
        shape = (375, 500) if number % 2 else (500, 375)
        kind = os.path.join(folder, "train", f"class{number % CLASSES}")
        os.makedirs(kind, exist_ok=True)
        paths.append(os.path.join(kind, f"{number:04d}.jpg"))
        with open(paths[-1], "wb") as file:
            file.write(photos.encoded(photos.pixels(*shape, seed=number)))
    return paths


def pipeline(folder: str):
    """Returns a function that makes a fresh iterator of batches, as for all contestants."""
    data = StreamedImages(
        format="folder",
        data_dir=folder,
        num_classes=CLASSES,
        image_size=SIZE,
        image_dtype="uint8",
        global_batch_size=BATCH,
    )
    data.validate()
    batches = input_pipelines.training(data).starting_at(0).prefetch(tf.data.AUTOTUNE)
    return lambda: iter(batches)


def windows(paths: list[str], count: int) -> tuple[list[str], np.ndarray]:
    """Returns files in random order, and a random crop for each, by NumPy."""
    rng = np.random.default_rng(0)
    files, found = [], []
    sizes = [(375, 500) if number % 2 else (500, 375) for number in range(len(paths))]
    while len(files) < count:
        number = rng.integers(len(paths))
        height, width = sizes[number]
        area, aspect = rng.uniform(0.08, 1) * height * width, (4 / 3) ** rng.uniform(-1, 1)
        rows, columns = round((area / aspect) ** 0.5), round((area * aspect) ** 0.5)
        if rows <= height and columns <= width:
            files.append(paths[number])
            top, left = rng.integers(height - rows + 1), rng.integers(width - columns + 1)
            found.append((top, left, rows, columns))
    return files, np.array(found, np.int32)


def one(path: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
    """Reads, decodes, crops and resizes: the indispensable part."""
    image = tf.io.decode_and_crop_jpeg(tf.io.read_file(path), window, 3)
    return tf.image.resize(image, (SIZE, SIZE))


def bare_loop(paths: list[str]):
    files, crops = windows(paths, BATCH)
    share = BATCH // CORES
    given = [(tf.constant(path), tf.constant(crop)) for path, crop in zip(files, crops)]
    function = tf.function(one)
    return _threads(lambda core: [function(*g) for g in given[core * share : (core + 1) * share]])


def bare_graph(paths: list[str]):
    files, crops = windows(paths, BATCH)
    files, crops = tf.constant(files), tf.constant(crops)
    share = BATCH // CORES

    @tf.function
    def loop(core):
        total = 0.0
        for i in tf.range(core * share, (core + 1) * share):
            total += one(files[i], crops[i])[0, 0, 0]
        return total

    return _threads(lambda core: loop(tf.constant(core)).numpy())


def _threads(work):
    """Returns batches that one thread per core makes, each its share."""

    def batches():
        barrier = threading.Barrier(CORES + 1)
        over = threading.Event()

        def thread(core: int):
            while True:
                barrier.wait()
                if over.is_set():
                    return
                work(core)
                barrier.wait()

        for core in range(CORES):
            threading.Thread(target=thread, args=(core,), daemon=True).start()
        try:
            while True:
                barrier.wait()
                barrier.wait()
                yield
        finally:
            over.set()
            barrier.wait()

    return batches


def keras_layers(folder: str):
    layers = [keras.layers.RandomCrop(SIZE, SIZE), keras.layers.RandomFlip("horizontal")]

    def augmented(images, labels):
        for layer in layers:
            images = layer(images, training=True)
        return images, labels

    data = keras.utils.image_dataset_from_directory(
        os.path.join(folder, "train"), batch_size=BATCH, image_size=(256, 256), verbose=False
    )
    data = data.repeat().map(augmented, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    return lambda: iter(data)


def seconds(make, steps: int) -> float:
    """Returns the time of `steps` batches of a fresh iterator after its first."""
    batches = make()
    next(batches)
    start = time.perf_counter()
    for _ in range(steps):
        next(batches)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--files", type=int, default=256)
    parser.add_argument("--steps", type=int, default=32, help="batches a turn")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = make_files(folder, given.files)
        contestants = {
            "pipeline": pipeline(folder),
            "bare loop": bare_loop(paths),
            "bare graph": bare_graph(paths),
            "keras": keras_layers(folder),
        }
        times = {name: [] for name in contestants}
        for turn in range(given.turns + 1):
            names = list(contestants)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                taken = seconds(contestants[name], given.steps)
                if turn:  # in the first, things are traced
                    times[name].append(taken)
        kilobytes = sum(map(os.path.getsize, paths)) / len(paths) / 1000
    print(
        f"{given.files} JPEG files of {kilobytes:.0f} kB, {CORES} cores, batches of {BATCH}; "
        f"medians of {given.turns} turns of {given.steps} batches"
    )
    for name, taken in times.items():
        rate = given.steps * BATCH / statistics.median(taken)
        ratio = statistics.median(b / a for a, b in zip(times["pipeline"], taken))
        print(f"  {name:11} {rate:7,.0f} images/s   pipeline / {name}: {ratio:.2f}")


if __name__ == "__main__":
    main()
