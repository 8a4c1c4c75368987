"""The steps: each runs a command of tftpu, and records what it made as an artifact.

A step is a lightweight Python component: Kubeflow Pipelines copies the source of its function into
the compiled pipeline, so that a function imports what it needs itself. Every folder is given, local
or gs://, and an artifact only points to it: tftpu reads and writes buckets by itself, and a run has
to be found again when its step is repeated.

Steps are ordered by what they take from one another, or by `.after`.
"""

from kfp import dsl

from tftpu.launch.kfp.conditions import unmet
from tftpu.version import __version__

IMAGE = f"tftpu:{__version__}"  # of launch/Dockerfile; `set_container_image` names another


def _tftpu(words: list[str], flags: str, setup: str) -> None:
    """Runs a command of tftpu; if it fails, its exit code ends the step."""
    import os
    import shlex
    import subprocess
    import sys

    words = [*words, *shlex.split(flags)]
    program = os.path.join(os.path.dirname(sys.executable), "tftpu")
    if not setup and not os.path.exists(program):
        sys.exit(f"There is no {program}: the image of a step has to have tftpu in its Python.")
    command = [program, *words]
    if setup:  # shell functions of `tftpu launch`: `train` runs the command of `arguments`
        script = f"{setup}\narguments=({shlex.join(words)})\nreceive\ninstall\ntrain"
        command = ["bash", "-c", script]
    print("tftpu", shlex.join(words), flush=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        name = " ".join(word for word in words if not word.startswith("-"))
        print(f"tftpu {name} ended with exit code {code}: its message is above.", file=sys.stderr)
        sys.exit(code)


_step = dsl.component(base_image=IMAGE, install_kfp_package=False, additional_funcs=[_tftpu])


@_step
def convert(
    source: str,
    output: str,
    dataset: dsl.Output[dsl.Dataset],
    flags: str = "",
    setup: str = "",
) -> None:
    """Converts a source to shards: `tftpu data convert`.

    Args:
        source: such as "images:gs://BUCKET/photos".
        output: folder of the data set.
        dataset: that folder.
        flags: further ones of the command.
        setup: what `tftpu launch` sent, for its pipelines.
    """
    dataset.uri = output
    dataset.metadata["source"] = source
    _tftpu(["data", "convert", f"--source={source}", f"--output={output}"], flags, setup)


@dsl.component(base_image=IMAGE, install_kfp_package=False, additional_funcs=[_tftpu, unmet])
def check(config: str, overrides: str = "", condition: str = "", setup: str = "") -> None:
    """Checks the data of a config before machines are paid for: `tftpu data check`.

    Args:
        config: name of a config, or path of one in the image.
        overrides: changes of it, as on the command line.
        condition: of the gate behind the training, to be checked as well.
        setup: what `tftpu launch` sent, for its pipelines.
    """
    import sys

    try:
        unmet(condition or "loss<=inf", {})
    except ValueError as error:
        sys.exit(f"The gate {condition!r} cannot be read: {error}.")
    _tftpu(["data", "check", f"--config={config}"], overrides, setup)


@_step
def search(
    config: str,
    workdir: str,
    space: list,
    trials: int = 20,
    overrides: str = "",
    setup: str = "",
) -> str:
    """Searches for the best values of fields: `tftpu search`.

    Args:
        config: name of a config, or path of one in the image.
        workdir: folder of the search, which outlasts the machine.
        space: fields and their values, such as "optimizer.learning_rate=log:1e-4..1e-1"; empty:
            that of the config.
        trials: number of them.
        overrides: changes of the config, and other flags, as on the command line.
        setup: what `tftpu launch` sent, for its pipelines.

    Returns:
        The best values, for the `overrides` of `train`.
    """
    import json
    import shlex

    from tftpu.storage import files

    words = ["search", f"--config={config}", f"--workdir={workdir}", f"--trials={trials}"]
    _tftpu([*words, *(f"--space={text}" for text in space)], overrides, setup)
    best = json.loads(files.read(f"{workdir}/result.json"))["best"]
    return shlex.join(best["overrides"])


@_step
def train(
    config: str,
    workdir: str,
    run: dsl.Output[dsl.Model],
    overrides: str = "",
    setup: str = "",
) -> None:
    """Trains a config, or resumes its run: `tftpu train`.

    Args:
        config: name of a config, or path of one in the image.
        workdir: folder of the run, which outlasts the machine.
        run: that folder.
        overrides: changes of the config, and other flags, as on the command line.
        setup: what `tftpu launch` sent, for its pipelines.
    """
    run.uri = workdir
    run.metadata["config"] = config
    _tftpu(["train", f"--config={config}", f"--workdir={workdir}"], overrides, setup)


@_step
def evaluate(workdir: str, metrics: dsl.Output[dsl.Metrics], setup: str = "") -> None:
    """Evaluates the best checkpoint of a run: `tftpu evaluate`.

    Args:
        workdir: folder of the run.
        metrics: loss and metrics on the evaluation split; the file holds what the command wrote.
        setup: what `tftpu launch` sent, for its pipelines.
    """
    import json
    import os
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        path = os.path.join(scratch, "metrics.json")
        _tftpu(["evaluate", f"--workdir={workdir}", f"--output={path}"], "", setup)
        with open(path) as file:
            found = json.load(file)
        # The artifact may be in a mounted bucket, in which files are not renamed.
        shutil.copyfile(path, metrics.path)
    metrics.metadata["step"] = found["step"]
    for name, value in found["metrics"].items():
        if value is not None:
            metrics.log_metric(name, value)


@dsl.component(base_image=IMAGE, install_kfp_package=False, additional_funcs=[unmet])
def gate(metrics: dsl.Input[dsl.Metrics], condition: str) -> None:
    """Ends the pipeline, with the reason, unless a metric is good enough.

    Args:
        metrics: of `evaluate`.
        condition: "METRIC>=NUMBER" or "METRIC<=NUMBER"; several with commas in between.
    """
    import json
    import sys

    with open(metrics.path) as file:
        found = json.load(file)["metrics"]
    print(" ".join(f"{name}={value}" for name, value in found.items()), flush=True)
    try:
        reasons = unmet(condition, found)
    except ValueError as error:
        sys.exit(f"The gate {condition!r} cannot be read: {error}.")
    if reasons:
        sys.exit(f"The gate {condition} is not met, so nothing follows: {'; '.join(reasons)}.")


@_step
def export(
    workdir: str,
    output: str,
    model: dsl.Output[dsl.Model],
    flags: str = "",
    setup: str = "",
) -> None:
    """Exports the best checkpoint of a run: `tftpu export`.

    Args:
        workdir: folder of the run.
        output: place of the export, whose ending names its format: without one, a SavedModel.
        model: that place.
        flags: further ones of the command.
        setup: what `tftpu launch` sent, for its pipelines.
    """
    model.uri = output
    model.metadata["run"] = workdir
    _tftpu(["export", f"--workdir={workdir}", f"--to={output}"], flags, setup)


@_step
def predict(
    workdir: str,
    input: str,
    output: str,
    predictions: dsl.Output[dsl.Dataset],
    flags: str = "",
    setup: str = "",
) -> None:
    """Predicts records with the best checkpoint of a run: `tftpu predict`.

    Args:
        workdir: folder of the run.
        input: such as "images:gs://BUCKET/new".
        output: folder of the predictions.
        predictions: that folder.
        flags: further ones of the command.
        setup: what `tftpu launch` sent, for its pipelines.
    """
    predictions.uri = output
    predictions.metadata["input"] = input
    words = ["predict", f"--workdir={workdir}", f"--input={input}", f"--output={output}"]
    _tftpu(words, flags, setup)
