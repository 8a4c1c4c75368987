"""`tftpu doctor`: each known problem is laid out on disk, and doctor finds only that one."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support.fakes.scratch_machine import V3, V5E
from tftpu.launch import main


def test_nothing_is_wrong_with_the_right_wheels(tpu_vm):
    facts, problems = tpu_vm.examine()
    assert problems == []
    assert facts["TensorFlow"] == "tensorflow-tpu 2.20.0"
    assert facts["libtpu"] == "0.0.14"
    assert facts["TPU"] == "1 chip attached"


def test_the_tpu_wheels_without_a_tpu_are_not_a_problem(tpu_vm):
    (tpu_vm.root / V5E.lstrip("/")).unlink()
    facts, problems = tpu_vm.examine()
    assert problems == []
    assert facts["TPU"] == "none attached"


def test_nothing_is_wrong_with_a_laptop(laptop):
    assert laptop.examine()[1] == []


@pytest.mark.parametrize("version", ["0.0.14", "0.0.43", "0.0.43.2", "0.0.45"])
def test_libtpu_that_has_the_symbol(tpu_vm, version):
    tpu_vm.replace("libtpu", version)
    assert tpu_vm.examine()[1] == []


@pytest.mark.parametrize("version", ["0.0.46", "0.0.51", "0.1", "0.0.13"])
def test_libtpu_that_makes_tensorflow_abort_at_import(tpu_vm, version):
    tpu_vm.replace("libtpu", version)
    problem = tpu_vm.problem()
    assert problem.name == "libtpu-version"
    assert problem.command == "pip install 'libtpu==0.0.14'"


def test_tensorflow_tpu_without_libtpu(tpu_vm):
    tpu_vm.uninstall("libtpu")
    assert tpu_vm.problem().name == "no-libtpu"


@pytest.mark.parametrize("other", ["tensorflow", "tensorflow-cpu"])
def test_a_plain_wheel_installed_over_the_tpu_one(tpu_vm, other):
    tpu_vm.install(other, "2.20.0")
    problem = tpu_vm.problem()
    assert problem.name == "clobbered-wheel"
    assert f"the files in place are {other}'s" in problem.what
    assert problem.command.startswith(f"pip uninstall -y {other} tensorflow-tpu && pip install ")


def test_the_tpu_wheel_installed_over_a_plain_one(scratch):
    scratch.install("tensorflow", "2.20.0")
    scratch.install("tensorflow-tpu", "2.20.0")
    scratch.install("libtpu", "0.0.14")
    scratch.write(V3)
    problem = scratch.problem()
    assert problem.name == "several-wheels"
    assert "the files in place are tensorflow-tpu's" in problem.what


def test_two_plain_wheels(laptop):
    laptop.install("tensorflow", "2.20.0")
    problem = laptop.problem()
    assert problem.name == "several-wheels"
    assert "the files in place are tensorflow's" in problem.what


def test_a_wheel_broken_by_removing_the_other(tpu_vm):
    tpu_vm.install("tensorflow", "2.20.0")
    tpu_vm.uninstall("tensorflow")
    problem = tpu_vm.problem()
    assert problem.name == "damaged-wheel"
    assert problem.command == ("pip install --force-reinstall --no-deps 'tensorflow-tpu==2.20.0'")


def test_a_source_file_changed_without_changing_its_size(laptop):
    file = laptop.site / "tensorflow/python/client.py"
    file.write_text(file.read_text().replace("x = 1", "x = 2"))
    assert laptop.problem().name == "damaged-wheel"


@pytest.mark.parametrize("device", [V3, V5E])
def test_a_plain_wheel_on_a_tpu_vm(laptop, device):
    laptop.write(device)
    problem = laptop.problem()
    assert problem.name == "no-tpu-wheel"
    assert "ConfigureDistributedTPU" in problem.why


def test_jax_drives_the_tpu_beside_a_plain_wheel(laptop):
    laptop.write(V5E)
    laptop.install("jax", "0.10.2")
    laptop.install("jaxlib", "0.10.2")
    assert laptop.problem().name == "no-tpu-wheel"  # without libtpu JAX cannot, either
    laptop.install("libtpu", "0.0.52")
    facts, problems = laptop.examine()
    assert problems == []
    assert facts["jax"] == facts["jaxlib"] == "0.10.2"


@pytest.mark.parametrize("wheel", ["tensorflow-cpu", "tensorflow-tpu"])
def test_a_tpu_that_tensorflow_does_not_support_is_for_jax(scratch, wheel):
    scratch.write(V5E)
    scratch.environ["TPU_ACCELERATOR_TYPE"] = "tpu7x-8"
    scratch.install(wheel, "2.20.0")
    scratch.install("libtpu", "0.0.14")
    problem = scratch.problem()
    assert problem.name == "jax-only-tpu" and "TensorFlow does not support" in problem.what
    assert ("pip uninstall -y tensorflow-tpu && " in problem.command) == (wheel == "tensorflow-tpu")
    assert "jax[tpu]" in problem.command
    if wheel == "tensorflow-cpu":
        scratch.install("jax", "0.10.2")
        scratch.install("jaxlib", "0.10.2")
        assert scratch.examine()[1] == []


@pytest.mark.parametrize("jaxlib", [None, "0.10.3"])
def test_jax_without_the_jaxlib_that_belongs_to_it(laptop, jaxlib):
    laptop.install("jax", "0.10.2")
    if jaxlib:
        laptop.install("jaxlib", jaxlib)
    problem = laptop.problem()
    assert problem.name == "jaxlib-version"
    assert problem.command == "pip install 'jaxlib==0.10.2'"


def test_no_tensorflow(scratch):
    problem = scratch.problem()
    assert problem.name == "no-tensorflow"
    assert re.fullmatch(r"pip install 'tensorflow(-cpu)?~=2.20.0'", problem.command)
    scratch.write(V5E)
    command = scratch.problem().command
    assert command.startswith("pip install tensorflow-tpu==2.20.0 libtpu==0.0.14 ")


@pytest.mark.parametrize("python", [(3, 10), (3, 14)])
def test_a_python_without_a_wheel(laptop, python):
    laptop.python = python
    assert laptop.problem().name == "python-version"


@pytest.mark.parametrize(
    ("package", "version", "name"),
    [
        ("setuptools", "82.0.0", "setuptools-version"),
        ("tensorboard", "2.21.0", "tensorboard-version"),
        ("tensorboard", None, "no-tensorboard"),
        ("keras", "3.13.2", "keras-version"),
        ("keras", "2.15.0", "keras-version"),
        ("importlib_resources", None, "no-importlib-resources"),
    ],
)
def test_a_package_of_a_mismatched_version(laptop, package, version, name):
    laptop.uninstall(package)
    if version:
        laptop.install(package, version)
    assert laptop.problem().name == name


def test_the_plugin_that_crashes_writes_to_buckets(laptop):
    laptop.install("tensorflow-io-gcs-filesystem", "0.37.1")
    assert laptop.problem().name == "gcs-filesystem-plugin"


def test_metadata_made_for_a_newer_protobuf(laptop):
    laptop.install("protobuf", "5.29.6")
    laptop.install("tensorflow-metadata", "1.17.3")
    assert laptop.examine()[1] == []
    laptop.replace("tensorflow-metadata", "1.21.0")
    assert laptop.problem().name == "tensorflow-metadata-version"
    laptop.replace("protobuf", "6.31.1")
    assert laptop.examine()[1] == []


def test_tensorflow_2_19_needs_that_plugin(scratch):
    scratch.install("tensorflow-cpu", "2.19.1")
    scratch.install("tensorflow-io-gcs-filesystem", "0.37.1")
    scratch.replace("tensorboard", "2.19.0")
    assert scratch.examine()[1] == []


def test_a_stale_lockfile(tpu_vm):
    tpu_vm.write("/tmp/libtpu_lockfile")
    problem = tpu_vm.problem()
    assert (problem.name, problem.command) == ("stale-lockfile", "sudo rm /tmp/libtpu_lockfile")


def test_a_lockfile_means_nothing_without_a_tpu(laptop):
    laptop.write("/tmp/libtpu_lockfile")
    assert laptop.examine()[1] == []


@pytest.mark.parametrize(
    ("library", "framework"), [("jaxlib/libjax.so", "JAX"), ("_XLAC.so", "torch_xla")]
)
def test_another_framework_holds_the_tpu(tpu_vm, library, framework):
    tpu_vm.write("/tmp/libtpu_lockfile")  # not stale: its process lives
    tpu_vm.write("/proc/4321/cmdline", "python\0train.py\0")
    tpu_vm.write("/proc/4321/maps", f"7f00-7f01 r-xp 0 00:00 0 /site-packages/{library}\n")
    (tpu_vm.root / "proc/4321/fd").mkdir()
    os.symlink(V5E, tpu_vm.root / "proc/4321/fd/7")
    problem = tpu_vm.problem()
    assert (problem.name, problem.command) == ("tpu-held", "kill 4321")
    process = f"Process 4321 (python train.py), which runs {framework},"
    assert problem.what == f"{process} is using the TPU."


@pytest.mark.parametrize(
    "environ", [{"TPU_NAME": "local"}, {"PJRT_DEVICE": "TPU"}, {"TPU_NAME": "local", "A": "b"}]
)
def test_a_requested_tpu_that_is_missing(laptop, environ):
    laptop.environ |= environ
    problem = laptop.problem()
    assert problem.name == "no-tpu"
    assert next(iter(environ)) in problem.command


def test_pjrt_is_set_to_another_device(tpu_vm):
    tpu_vm.environ["PJRT_DEVICE"] = "CPU"
    assert tpu_vm.problem().name == "pjrt-device"


def test_a_library_path_that_does_not_exist(tpu_vm):
    tpu_vm.environ["TF_PLUGGABLE_DEVICE_LIBRARY_PATH"] = "/lib/libtpu.so"
    assert tpu_vm.problem().name == "library-path"
    tpu_vm.write("/lib/libtpu.so")
    assert tpu_vm.examine()[1] == []


def run_doctor(*flags: str, **environ: str) -> subprocess.CompletedProcess:
    """Runs the command itself on this machine."""
    keep = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    program = "import sys; from tftpu.launch.main import run; sys.argv[0] = 'tftpu'; run()"
    return subprocess.run(
        [sys.executable, "-c", program, "doctor", *flags],
        capture_output=True,
        text=True,
        env={**keep, "NO_GCE_CHECK": "true", **environ},
        check=False,
    )


@pytest.mark.slow
def test_this_machine_has_no_problems_and_tensorflow_runs_in_a_child():
    done = run_doctor("--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["problems"]) == (0, []), done.stdout + done.stderr
    assert report["facts"]["TensorFlow sees"].startswith("CPU; version 2.")
    assert "without TPU kernels" in report["facts"]["TensorFlow sees"]


def test_a_problem_makes_it_exit_with_2_and_show_the_command():
    done = run_doctor("--workdir=gs://bucket/run", HOME="/nonexistent")
    assert done.returncode == 2
    assert "Fix it with:  gcloud auth application-default login" in done.stdout
    assert done.stderr == "tftpu: doctor found 1 problem: no-credentials.\n"


@pytest.mark.medium
def test_an_import_that_aborts_is_reported(tmp_path):
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow/__init__.py").write_text(
        "import os, sys\n"
        "print('SomeTpuOp_DoWork not available in this library.', file=sys.stderr, flush=True)\n"
        "os.abort()\n"
    )
    done = run_doctor("--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    (problem,) = json.loads(done.stdout)["problems"]
    assert problem["name"] == "tensorflow-fails"
    assert "signal 6" in problem["what"]
    assert "lacks SomeTpuOp_DoWork" in problem["why"]


def test_it_does_not_import_tensorflow_itself():
    program = (
        "import sys\nfrom tftpu.launch.commands.checking import doctor\n"
        "from tftpu.launch.diagnosis import machine\n"
        "doctor.examine(machine.Machine(), [])\nassert 'tensorflow' not in sys.modules\n"
        "assert 'keras' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"NO_GCE_CHECK": "true"})


def test_the_config_names_the_bucket(capsys, monkeypatch):
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    flags = ["--config=digits_resnet", "--config.data.data_dir=gs://mine/data", "--json"]
    assert main.main(["doctor", *flags]) == 2
    report = json.loads(capsys.readouterr().out)
    assert "gs://mine," in report["problems"][0]["what"]


def write_keras_settings(scratch, text: str) -> str:
    file = scratch.root.parent / ".keras" / "keras.json"
    file.parent.mkdir()
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"image_data_format": "channels_first"}, "image_data_format='channels_first'"),
        ({"epsilon": 0.01}, "epsilon=0.01"),
    ],
)
def test_settings_of_keras_that_change_numbers_are_named(laptop, setting, said):
    file = write_keras_settings(laptop, json.dumps(setting))
    facts, (problem,) = laptop.examine()
    assert facts["Changes numbers"] == f"{said} in keras.json"
    assert problem.name == "keras-settings" and problem.what == f"{file} sets {said}."
    assert problem.command == f"rm {file}"


@pytest.mark.parametrize(
    "text",
    ['{"floatx": "float16"}', '{"image_data_format": "rows"}', "[]", '{"nnx_enabled": true}'],
)
def test_settings_that_keras_cannot_train_with_are_a_problem(laptop, text):
    file = write_keras_settings(laptop, text)
    problem = laptop.problem()
    assert problem.name == "keras-settings" and problem.command == f"rm {file}"
    assert "no command can train" in problem.why


def test_settings_as_keras_writes_them_are_no_problem(laptop):
    written = '{"floatx": "float32", "epsilon": 1e-07, "backend": "torch"}'
    write_keras_settings(laptop, written)
    facts, problems = laptop.examine()
    assert not problems and facts["Changes numbers"] == "nothing is set"


def test_another_home_of_keras_is_read(laptop, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "keras.json").write_text('{"epsilon": 0.5}')
    laptop.environ["KERAS_HOME"] = str(tmp_path / "elsewhere")
    assert laptop.problem().command == f"rm {tmp_path}/elsewhere/keras.json"


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("KERAS_BACKEND", "torch", "keras-backend"),
        ("TF_USE_LEGACY_KERAS", "1", "legacy-keras"),
        ("KERAS_NNX_ENABLED", "1", "keras-settings"),
    ],
)
def test_a_variable_that_keeps_keras_from_training_is_unset_by_the_fix(
    laptop, variable, value, name
):
    laptop.environ[variable] = value
    problem = laptop.problem()
    assert problem.name == name and problem.command == f"unset {variable}"


def test_variables_that_change_numbers_are_named(laptop):
    laptop.environ |= {
        "JAX_ENABLE_X64": "1",
        "NVIDIA_TF32_OVERRIDE": "0",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    facts, problems = laptop.examine()
    assert not problems
    assert facts["Changes numbers"] == "JAX_ENABLE_X64=1, NVIDIA_TF32_OVERRIDE=0"
