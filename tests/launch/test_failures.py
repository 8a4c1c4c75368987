"""The table of known failures: one test per row, with the real message wherever possible."""

import contextlib
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest
import requests
import tensorflow as tf

from tests.support import warm
from tests.support.programs import jax_process
from tftpu import preflight
from tftpu.errors import UserError
from tftpu.input_pipelines.convert import processes
from tftpu.launch import failures, main
from tftpu.launch.commands.training import train
from tftpu.launch.run import finished
from tftpu.models.layers.normalization import GhostBatchNormalization
from tftpu.storage import buckets, retry


def explained(name: str, message: str | BaseException) -> str:
    """Returns the explanation of a message, which must come from the row of that name."""
    error = message if isinstance(message, BaseException) else RuntimeError(message)
    said = f"{type(error).__name__}: {error}"
    (row,) = [row for row in failures.FAILURES if row.name == name]
    text, _, original = failures.explain(error).partition("\n\n")
    assert text.startswith(row.meaning.split("{")[0])
    assert original.split() == (said.split() if row.remedy else [])  # the message, below
    return text


def raised(function, *args) -> BaseException:
    with pytest.raises(Exception) as caught:
        function(*args)
    return caught.value


def compiled(function):
    return tf.function(function, jit_compile=True)


# Provoked here.


def test_plain_tensorflow_connecting_to_a_tpu():
    # In a separate process: it resets TensorFlow's context.
    program = (
        "import tensorflow as tf\n"
        "resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu='local')\n"
        "tf.tpu.experimental.initialize_tpu_system(resolver)\n"
    )
    done = warm.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    message = done.stderr[done.stderr.index("tensorflow.python.framework.errors_impl.") :]
    assert "tftpu doctor" in explained("no-tpu-kernels", message)


def test_an_op_without_a_kernel():
    size = tf.function(
        lambda: tf.raw_ops.CudnnRNNParamsSize(
            num_layers=1, num_units=1, input_size=1, T=tf.float32, S=tf.int32
        )
    )
    assert "CudnnRNNParamsSize" in explained("no-kernel", raised(size))


def test_a_resolver_without_an_address(monkeypatch):
    monkeypatch.delenv("TPU_NAME", raising=False)
    error = raised(tf.distribute.cluster_resolver.TPUClusterResolver)
    assert 'tpu="local"' in explained("no-tpu-name", error)


def test_a_pipeline_that_rejects_a_record():
    def refuse(_):
        raise UserError("record 3 of photos.tfrecord: no image.")

    refused = tf.data.Dataset.range(1).map(lambda x: tf.numpy_function(refuse, [x], tf.int64))
    text = explained("bad-record", raised(list, refused))
    assert text == "The data cannot be read: record 3 of photos.tfrecord: no image."


def test_the_data_end_within_a_device_loop():
    @tf.function
    def loop(iterator):
        for _ in tf.range(5):
            next(iterator)

    error = raised(loop, iter(tf.data.Dataset.range(2)))
    assert "repeat()" in explained("end-of-data", error)


def test_a_shard_that_was_removed(tmp_path):
    path = str(tmp_path / "shard")
    (tmp_path / "shard").write_bytes(b"1")
    batches = tf.data.FixedLengthRecordDataset(path, record_bytes=1).repeat()
    iterator = iter(batches)
    next(iterator)
    (tmp_path / "shard").unlink()
    # Some elements may have been read ahead.
    error = raised(lambda: [next(iterator) for _ in range(1000)])
    assert path in explained("data-file-gone", error)


def test_a_shape_that_depends_on_data():
    @compiled
    def step(image):
        with tf.name_scope("encoder"), tf.name_scope("block_3"):
            size = tf.random.uniform([], 1, 4, dtype=tf.int32)
            return tf.image.resize(image, [size, size])

    text = explained("dynamic-shape", raised(step, tf.zeros([1, 4, 4, 3])))
    assert "'encoder/block_3/resize'" in text


def test_an_op_that_xla_lacks():
    class Parse(keras.layers.Layer):
        def call(self, x):
            return tf.strings.to_number(tf.strings.as_string(x))

    layer = Parse(name="my_parser")
    text = explained("unsupported-op", raised(compiled(layer), tf.constant([1.0])))
    assert "has no AsString" in text
    assert "'my_parser" in text


def test_a_python_function_in_the_step():
    @compiled
    def step(x):
        return tf.py_function(lambda y: y, [x], tf.float32)

    assert "has no EagerPyFunc" in explained("unsupported-op", raised(step, tf.constant(1.0)))


def test_strings_on_the_device():
    error = raised(compiled(lambda x: x + "a"), tf.constant("a"))
    assert "dataset.map" in explained("strings", error)


@pytest.mark.slow
def test_the_memory_of_the_host():
    error = raised(tf.zeros, [10**6, 10**7])
    text = explained("host-memory", error)
    assert "of the CPU is full" in text
    assert "[1000000,10000000]" in text


@pytest.mark.slow
def test_tensorboard_is_missing():
    program = (
        "import sys\nsys.modules['tensorboard'] = None\nimport tensorflow as tf\n"
        "with tf.summary.create_file_writer('/nonexistent/x').as_default(0):\n"
        "    tf.summary.scalar('a', 1.0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    explained("no-tensorboard", done.stderr.strip().splitlines()[-1])


@pytest.mark.medium
def test_the_tpu_compiler_runs_out_of_memory():
    # The real compiler, on a machine without a TPU: 40 GB of products on a chip of 16.
    program = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
chip = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
one = jax.sharding.SingleDeviceSharding(chip)
step = jax.jit(lambda a: jnp.sort(a @ a.T)[0], in_shardings=one, out_shardings=one)
shape = jax.ShapeDtypeStruct((100_000, 512), jnp.float32)
step.trace(shape).lower(lowering_platforms=("tpu",)).compile()
"""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    done = warm.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    message = done.stderr[done.stderr.index("RESOURCE_EXHAUSTED") :]
    text = explained("hbm-at-compile-time-in-new-words", message)
    assert re.search(r"it needs [\d.]+G of 15\.75G", text)


@pytest.mark.slow
def test_a_process_of_a_conversion_that_is_killed():
    with processes.parallel_map(2, 2) as each:
        text = explained("worker-killed", raised(each, os._exit, [1, 1]))
    assert "fewer --workers" in text


def test_a_disk_that_is_full():
    with open("/dev/full", "w") as file:  # writes to it fail as those to a full disk
        file.write("x")
        error = raised(file.flush)
        with contextlib.suppress(OSError):
            file.close()
    assert "complete files are kept" in explained("disk-full", error)


def test_a_file_that_may_not_be_written():
    error = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/data/train.tfrecord")
    assert "permissions" in explained("may-not-write", error)


def test_a_bucket_that_cannot_be_reached(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("Could not resolve host")

    monkeypatch.setattr(retry, "POLICY", retry.Policy(seconds=0.01))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    monkeypatch.setattr(requests.Session, "request", unreachable)
    buckets._create_client.cache_clear()
    error = raised(finished.load_experiment, "gs://bucket/run")
    assert "gs://bucket/run/config.json cannot be read" in explained("bucket", error)
    assert "doctor --workdir" in explained("bucket", error)
    # Not the code of a mistake, after which nothing restarts a run.
    assert failures.run_for_exit_code(lambda: finished.load_experiment("gs://bucket/run")) == 69
    buckets._create_client.cache_clear()


def test_a_batch_without_complete_groups_in_preflight():
    def model():
        layers = [keras.Input((8,)), keras.layers.Reshape((1, 8)), GhostBatchNormalization(16)]
        made = keras.Sequential([*layers, keras.layers.Flatten()])
        made.compile("sgd", "mse")
        return made

    batch = (tf.TensorSpec((192, 8)), tf.TensorSpec((192, 8)))
    error = raised(lambda: preflight.check(model, batch, ["v3-8"]))
    assert "multiple of norm_batch x replicas" in explained("norm-batch", error)


@pytest.mark.slow
def test_failures_of_models_on_the_jax_engine():
    said = json.loads(jax_process.output("programs.jax_failures"))
    assert "keras.ops.where" in explained("value-while-tracing", said["branch"])
    assert "keras.ops" in explained("array-while-tracing", said["through_numpy"])
    assert "keras.ops.where(mask" in explained("boolean-index", said["masked"])
    assert "add_weight" in explained("kept-tensor", said["keeping"])
    assert "no option xla_tpu_sc" in explained("compiler-option", said["options"])


# What needs a TPU, or an older libtpu: the published texts.

HBM = """Compilation failure: Ran out of memory in memory space hbm. Used 41.74G of 16.00G hbm. \
Exceeded hbm capacity by 25.74G.

Total hbm usage >= 41.74G:
    reserved        528.00M
    program          41.22G
    arguments       unknown size

  Largest program allocations in hbm:

  1. Size: 32.00G
     Operator: op_type="FloorMod" op_name="slicewise_79/cic_update/FloorMod"
     Shape: s32[8388608,8,4]{2,1,0:T(8,128)}
     Unpadded size: 1.00G"""
PUBLISHED = [
    ("hbm-at-compile-time", HBM, "it needs 41.74G of 16.00G"),
    ("hbm-at-compile-time", HBM, "'slicewise_79/cic_update'"),
    (
        "hbm-at-run-time",
        "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 196.00M. That "
        "was not possible. There are 134.44M free.; (1x0x0_HBM0)",
        "196.00M were requested and 134.44M are free",
    ),
    (
        "hbm-at-run-time",
        "Resource exhausted: From /job:tpu_worker/replica:0/task:0:\nAttempting to reserve 3.95G "
        "at the bottom of memory. That was not possible. There are 1.92G free, 0B reserved, and "
        "1.92G reservable.;",
        "3.95G were requested and 1.92G are free",
    ),
    (
        "kernel-memory",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack for "
        "%fusion.1. Scoped allocation with size 20.00M and limit 16.00M exceeded scoped vmem limit",
        "model.attention=plain",
    ),
    (
        "premapped-buffer",
        "Tpu host premapped buffer is enabled, but premapped allocation failed: "
        "Failed to allocate using premapped buffer for (size, alignment) = (4294967296, 4096)",
        "TPU_PREMAPPED_BUFFER_SIZE",
    ),
    (
        "transfer-manager",
        "could not find registered transfer manager for platform Host -- check target linkage "
        "[[{{node StatefulPartitionedCall}}]] [Op:__inference_multi_step_on_iterator_33145]",
        "jit_compile=False",
    ),
    (
        "transfer-manager",
        "could not find registered transfer manager for platform Host -- check target linkage "
        "[Op:__inference__jit_compiled_convolution_op_26169]",
        "with groups",
    ),
    ("strings", "Unsupported data type for TPU: string, caused by output input_1:0", "numbers"),
    (
        "unsupported-op",
        "Compilation failure: Detected unsupported operations when trying to compile graph "
        "cluster_15366487156777984482[] on XLA_TPU_JIT: Placeholder (No registered 'Placeholder' "
        "OpKernel for XLA_TPU_JIT devices compatible with node {{node "
        "tpu_139872799811176/input_2}}",
        "has no Placeholder.",
    ),
    (
        "no-tpu",
        "No matching devices found for '/device:TPU_SYSTEM:0' [Op:__inference__tpu_init_fn_4]",
        "stale lockfile",
    ),
    (
        "tpu-in-use",
        "The TPU is already in use by process with pid 4321. Not attempting to load libtpu.so in "
        "this process.",
        "tftpu doctor",
    ),
    (
        "tpu-in-use",
        'Internal error when accessing libtpu multi-process lockfile. Run "$ sudo rm '
        '/tmp/libtpu_lockfile".',
        "tftpu doctor",
    ),
    (
        "libtpu-symbol",
        "ConfigureDistributedTpuOp_DoWork not available in this library.",
        "lacks ConfigureDistributedTpuOp_DoWork",
    ),
    (
        "local-files",
        "File system scheme '[local]' not implemented (file: 'train-images-idx3-ubyte')\n"
        "\t [[{{node IteratorGetNext}}]]",
        "gs://",
    ),
]


@pytest.mark.parametrize(("name", "message", "says"), PUBLISHED)
def test_published_messages(name, message, says):
    assert says in explained(name, message)


def test_every_row_has_a_test():
    named = re.findall(r'explained\("([\w-]+)"', Path(__file__).read_text())
    rows = [row.name for row in failures.FAILURES]
    assert len(set(rows)) == len(rows)
    assert set(rows) == {*named, *(name for name, _, _ in PUBLISHED)}


def test_a_name_that_is_too_long():
    assert explained("long-name", raised(open, "x" * 300)).startswith(f"The name {'x' * 40}… is")


def test_an_unknown_message_is_not_explained():
    assert failures.explain(KeyError("End")) is None


@pytest.mark.parametrize(
    ("node", "layer"),
    [
        ("while/body/_1/StatefulPartitionedCall/gpt_1/block_0/attention_1/MatMul", None),
        ("gradient_tape/gpt_1/block_0/attention_1/MatMul", None),
        ("tpu_139872799811176/input_2", ""),
        ("while/body/_12/IteratorGetNext", ""),
        ("MatMul", ""),
    ],
)
def test_the_layer_is_the_name_without_tensorflows_additions(node, layer):
    expected = "gpt_1/block_0/attention_1" if layer is None else layer or None
    assert failures.find_layer(f"[[{{{{node {node}}}}}]]") == expected


def test_a_known_failure_of_a_command_is_explained_and_exits_with_2(capsys, monkeypatch):
    def fail(_):
        compiled(lambda x: x + "a")(tf.constant("a"))

    monkeypatch.setattr(train, "run", fail)
    assert main.main(["train", "--config=digits_resnet"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tftpu: Strings reach the device")
    assert "  InvalidArgumentError: Detected unsupported operations" in said


def test_an_unknown_failure_of_a_command_keeps_its_traceback(monkeypatch):
    def fail(_):
        raise KeyError("mistake of ours")

    monkeypatch.setattr(train, "run", fail)
    with pytest.raises(KeyError):
        main.main(["train", "--config=digits_resnet"])
