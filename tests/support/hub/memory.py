"""Measures the memory that `from_preset` needs: in the scope of the JAX engine, and under Keras.

    python -m tests.support.hub.memory [--layers=24] [--folder=PLACE]

Writes a GPT-2 of 1,280 units with random weights in float32, 2.2 GB with 24 layers, once as a
preset of KerasHub (H5) and once as a folder of Transformers (safetensors). Each way of loading has
its own process with virtual CPU devices. Prints for each the growth of its resident memory, in
multiples of the file; what the first device holds at most while weights are assigned, in multiples
of the file, too; and the seconds that the call takes. All devices are in the host's memory, so that
a model whose weights are divided takes at least 1.00, and a copy on each of two devices 2.00.

The pages of a file of safetensors, which is mapped into memory, count as resident, although the
system can drop them; "own" leaves them out.

Evidence: executed, on this machine's CPU.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

UNITS, VOCABULARY = 1280, 50257
MOST = 3.0  # times the file
DEVICES = {"engine.scope(), fsdp:8": 8, "ModelParallel": 8, "DataParallel": 2, "plain Keras": 1}


def main(layers: int, place: str | None) -> None:
    """Writes the weights, runs all ways and prints a line for each."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        print(f"{'format':13}{'way':24}{'host':>6}{'own':>6}{'device':>8}{'seconds':>9}")
        for name, file in (("H5", "model.weights.h5"), ("safetensors", "model.safetensors")):
            _run("write", folder, name, str(layers))
            size = (Path(folder) / file).stat().st_size
            for way in DEVICES:
                found = json.loads(_run(way, folder, str(MOST * size)))
                if not found:
                    print(f"{name:13}{way:24} ended: more than {MOST:.2f}", flush=True)
                    continue
                parts = [found[key] / size for key in ("host", "own", "device")]
                line = f"{parts[0]:6.2f}{parts[1]:6.2f}{parts[2]:8.3f}{found['seconds']:9.1f}"
                print(f"{name:13}{way:24}{line}", flush=True)
            for written in Path(folder).iterdir():
                written.unlink()


def _run(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.support.hub.memory", "--process", *arguments]
    environment = {**os.environ, "KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1] if done.stdout else ""


def write(folder: str, name: str, layers: str) -> None:
    """Writes a model with random weights into a folder, in the format of this name."""
    if name == "H5":
        import keras_hub

        keras_hub.models.GPT2Backbone(
            VOCABULARY, int(layers), UNITS // 64, UNITS, 4 * UNITS, max_sequence_length=1024
        ).save_to_preset(folder)
        return
    import transformers

    config = transformers.GPT2Config(n_embd=UNITS, n_head=UNITS // 64, n_layer=int(layers))
    transformers.GPT2Model(config).save_pretrained(folder, max_shard_size="99GB")


def load(way: str, folder: str, most: str) -> dict[str, float]:
    """Loads a preset in this process; returns bytes of memory and the seconds it took.

    A process that would take more bytes than `most` ends.
    """
    import jax

    import tftpu

    engine = tftpu.connect(engine="jax", virtual_devices=DEVICES[way], mesh=f"fsdp:{DEVICES[way]}")
    import keras_hub

    jax.device_put(0.0).block_until_ready()
    scope = engine.scope() if "scope" in way else contextlib.nullcontext()
    if "Parallel" in way:
        _distribute(way)
    on_device = _watch_first_device()
    before, start = _read_memory(), time.perf_counter()
    with _sampled_memory(float(most)) as own, scope:
        model: Any = keras_hub.models.GPT2Backbone.from_preset(folder)
    seconds = time.perf_counter() - start
    assert model.count_params() > 0
    return {
        "host": _read_memory()["VmHWM"] - before["VmRSS"],
        "own": max(own) - before["RssAnon"],
        "device": max(on_device),
        "seconds": seconds,
    }


def _distribute(way: str) -> None:
    """Sets Keras's own distribution."""
    import keras

    if way == "DataParallel":
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        return
    mesh = keras.distribution.DeviceMesh((1, DEVICES[way]), ["batch", "model"])
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["embeddings"] = (None, "model")
    layouts["(query|key|value)/kernel"] = ("model", None, None)
    layouts["attention_output/kernel"] = (None, None, "model")
    layouts["intermediate_dense/kernel"] = (None, "model")
    layouts["output_dense/kernel"] = ("model", None)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    )


def _watch_first_device() -> list[int]:
    """Returns a list that gets the bytes on the first device, for each value that is assigned."""
    import jax
    import keras

    kind: Any = keras.Variable
    own, found, first = kind._direct_assign, [0], jax.devices()[0]

    def direct_assign(variable: Any, value: Any) -> None:
        shards = (s for array in jax.live_arrays() for s in array.addressable_shards)
        parts = [s.data for s in shards if s.device == first]  # such parts are live arrays, too
        found.append(sum({p.unsafe_buffer_pointer(): p.nbytes for p in parts}.values()))
        own(variable, value)

    kind._direct_assign = direct_assign
    return found


@contextlib.contextmanager
def _sampled_memory(most: float) -> Iterator[list[int]]:
    """Samples the memory of this process, without mapped files, in a thread; yields a list."""
    found, end = [0], threading.Event()

    def sample() -> None:
        while not end.wait(0.005):
            found.append(_read_memory()["RssAnon"])
            if found[-1] > most:
                print("{}", flush=True)
                os._exit(0)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        end.set()
        thread.join()


def _read_memory() -> dict[str, int]:
    """Returns the bytes of Linux's counts of this process's memory, by name."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {line[0][:-1]: int(line[1]) * 1024 for line in lines if line[-1] == "kB"}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        if sys.argv[2] == "write":
            write(*sys.argv[3:])
        else:
            print(json.dumps(load(*sys.argv[2:])))
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("--layers", type=int, default=24)
        parser.add_argument("--folder")
        given = parser.parse_args()
        main(given.layers, given.folder)
