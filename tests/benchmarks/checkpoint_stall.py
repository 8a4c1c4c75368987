"""Measures how long training waits for a checkpoint, compared with `tf.train.Checkpoint`.

    python -m tests.benchmarks.checkpoint_stall                    # 100 million parameters
    python -m tests.benchmarks.checkpoint_stall --parameters=3e6

Both save the same variables, parameters and two slots each, to the same disk, alternately, in one
process. The stall is the time from the call until the variables may change again. The first save is
reported separately: the memory of the copy, which later saves reuse, is allocated when training
starts, some seconds earlier. Memory is the growth of the largest resident set until the first save
is done, in multiples of the state.
"""

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")


def resident() -> int:
    """Returns the bytes of memory that the process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The largest resident set within the context."""

    def __enter__(self) -> "Peak":
        self.bytes = resident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(0.005):
            self.bytes = max(self.bytes, resident())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="on the disk to be measured; a temporary one if not given")
    parser.add_argument(
        "--head_start", type=float, default=10.0, help="seconds of training before the first save"
    )
    arguments = parser.parse_args()

    import tensorflow as tf

    from tftpu.checkpoint.store import Checkpoints
    from tftpu.engines.tensorflow.leaves import build_leaves

    # As in a transformer: matrices of some million parameters, and many small vectors.
    width = 1024
    count = max(1, round(arguments.parameters / (4 * width * width)))
    shapes = [shape for _ in range(count) for shape in ((width, 4 * width), (4 * width,), (width,))]
    variables = {
        group: [tf.Variable(tf.random.normal(shape), name=f"{group}_{i}")
                for i, shape in enumerate(shapes)]
        for group in ("model", "momentum", "velocity")
    }  # fmt: skip
    every = [v for members in variables.values() for v in members]
    size = sum(4 * v.shape.num_elements() for v in every)

    def change() -> None:
        """Changes the values in place before each save, as a training step does."""
        for variable in every:
            variable.assign_add(tf.ones_like(variable))

    change()
    first = extra = 0
    stalls, whole, theirs = [], [], []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        ours = Checkpoints(os.path.join(folder, "ours"), keep=1)
        reference = tf.train.Checkpoint(variables=every)
        before = resident()
        ours.reserve(build_leaves(variables))
        time.sleep(arguments.head_start)
        with Peak() as peak:
            for turn in range(arguments.rounds + 1):
                began = time.perf_counter()
                ours.save(turn, build_leaves(variables), {})
                stalled = time.perf_counter() - began
                ours.wait()
                written = time.perf_counter() - began
                if ours.take_failure():
                    return 1
                if turn:
                    stalls.append(stalled)
                    whole.append(written)
                    began = time.perf_counter()
                    reference.save(os.path.join(folder, "theirs", "checkpoint"))
                    theirs.append(time.perf_counter() - began)
                    for name in os.listdir(os.path.join(folder, "theirs")):
                        os.unlink(os.path.join(folder, "theirs", name))
                else:
                    first, extra = stalled, peak.bytes - before
                change()
    stall, their = statistics.median(stalls), statistics.median(theirs)
    print(
        f"{sum(v.shape.num_elements() for v in every) / 3e6:.0f} M parameters, {size / 2**30:.2f} "
        f"GiB of state: training waits {1e3 * stall:.0f} ms (the whole save takes "
        f"{1e3 * statistics.median(whole):.0f} ms), tf.train.Checkpoint.save {1e3 * their:.0f} ms: "
        f"{100 * stall / their:.1f} % (the first: {1e3 * first:.0f} ms); memory {extra / size:.2f} "
        "copies of the state"
    )
    # One copy, and the pieces that are being written.
    return 0 if stall <= 0.1 * their and extra <= size + (64 << 20) else 1


if __name__ == "__main__":
    sys.exit(main())
