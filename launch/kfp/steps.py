"""The steps: each runs a command of tftpu, and records its result as an artifact.

A step is a lightweight Python component: Kubeflow Pipelines copies the source of its function into
the compiled pipeline, so each function imports what it needs. Every folder (local or gs://) is a
parameter, and an artifact only names it: tftpu itself reads and writes buckets, and a repeated step
must find its run again.

Steps are ordered by the results that they pass to each other, or by `.after`.
"""

from typing import Any

from kfp import dsl

from tftpu.launch.run.conditions import find_unmet
from tftpu.version import __version__

# The image of launch/Dockerfile; `set_container_image` names another one.
IMAGE = f"tftpu:{__version__}"


def _run_tftpu(words: list[str], flags: str, setup: str) -> None:
    """Runs a command of tftpu; if the command fails, exits with its code, so the step fails."""
    import itertools
    import os
    import shlex
    import signal
    import subprocess
    import sys

    name = " ".join(itertools.takewhile(lambda word: not word.startswith("-"), words))
    try:
        words = [*words, *shlex.split(flags)]
    except ValueError as error:
        sys.exit(f"The flags {flags!r} of tftpu {name} cannot be read: {error}.")
    program = os.path.join(os.path.dirname(sys.executable), "tftpu")
    if not setup and not os.path.exists(program):
        sys.exit(f"There is no {program}: tftpu must be installed in the image of a step.")
    command = [program, *words]
    # `setup` defines `receive`, `install` and `train`, which runs tftpu with `arguments`.
    if setup:
        script = f"{setup}\narguments=({shlex.join(words)})\nreceive\ninstall\ntrain"
        command = ["bash", "-c", script]
    print("tftpu", shlex.join(words), flush=True)
    notices: list[int] = []
    running: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: object) -> None:
        notices.append(number)
        for process in running:
            process.send_signal(number)

    earlier = signal.signal(signal.SIGTERM, forward)  # `tftpu train` then saves a checkpoint
    process = subprocess.Popen(command)
    running.append(process)
    if notices:  # a signal arrived before the process was started
        process.send_signal(notices[0])
    code = process.wait()
    signal.signal(signal.SIGTERM, earlier)
    if code < 0:
        sys.exit(f"tftpu {name} was ended by {signal.Signals(-code).name}.")
    if code:
        print(f"tftpu {name} ended with exit code {code}: its message is above.", file=sys.stderr)
        sys.exit(code)


def _format_code_flag(config: str) -> list[str]:
    """Returns the flag with which a command imports the run's config file; [] if it has none."""
    return [f"--config={config}"] if config.endswith(".py") else []


def _write_place(artifact: Any, place: str, **about: str) -> None:
    """Writes a path into an artifact's file and into its metadata.

    The artifact's own address does not change, because Kubeflow rejects addresses outside of the
    pipeline's root.
    """
    artifact.metadata.update(about, place=place)
    with open(artifact.path, "w") as file:
        file.write(f"{place}\n")


_step = dsl.component(
    base_image=IMAGE,
    install_kfp_package=False,
    additional_funcs=[_run_tftpu, _format_code_flag, _write_place],
)


@dsl.component(base_image=IMAGE, install_kfp_package=False, additional_funcs=[find_unmet])
def new_run(workdir: str, run: str, condition: str = "") -> str:
    """Names the folder of this pipeline run, before any other step.

    Args:
        workdir: folder for the runs, local or gs://.
        run: the name of this run, given as `dsl.PIPELINE_JOB_ID_PLACEHOLDER`. Kubeflow replaces a
            placeholder only if it is the whole value of a parameter.
        condition: the condition of the gate after the training; this step fails if it is invalid.

    Returns:
        The path of the folder.
    """
    import sys

    if any(sign in workdir for sign in "\"'\\"):
        sys.exit(f"The workdir {workdir!r} contains a quote or a backslash: choose another name.")
    try:
        find_unmet(condition or "loss<=inf", {})
    except ValueError as error:
        sys.exit(f"The gate {condition!r} cannot be read: {error}.")
    return f"{workdir.rstrip('/')}/{run}"


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
        source: the source, such as "images:gs://BUCKET/photos".
        output: folder of the data set.
        dataset: the artifact that names that folder.
        flags: further flags of the command.
        setup: in a pipeline of `tftpu launch`, shell functions that install the user's code.
    """
    _run_tftpu(["data", "convert", f"--source={source}", f"--output={output}"], flags, setup)
    _write_place(dataset, output, source=source)


@_step
def check(
    config: str, data_dir: str = "", overrides: str = "", condition: str = "", setup: str = ""
) -> None:
    """Checks the data of a config before machines are paid for: `tftpu data check`.

    Args:
        config: name of a config, or path of one in the image.
        data_dir: the folder of the data; "" uses that of the config.
        overrides: changes of the config, as on the command line.
        condition: the condition of the gate after the training; an unknown metric is an error.
        setup: in a pipeline of `tftpu launch`, shell functions that install the user's code.
    """
    words = [f"--config.data.data_dir={data_dir}"] if data_dir else []
    words += [f"--gate={condition}"] if condition else []
    _run_tftpu(["data", "check", f"--config={config}", *words], overrides, setup)


@_step
def search(
    config: str,
    workdir: str,
    space: list,
    trials: int = 20,
    data_dir: str = "",
    overrides: str = "",
    flags: str = "",
    setup: str = "",
) -> str:
    """Searches for the best values of fields: `tftpu search`.

    Args:
        config: name of a config, or path of one in the image.
        workdir: folder of the search, on storage that outlasts the machine.
        space: fields and their values, such as "optimizer.learning_rate=log:1e-4..1e-1"; [] for
            the config's space.
        trials: the number of trials.
        data_dir: the folder of the data; "" uses that of the config.
        overrides: changes of the config, as on the command line.
        flags: further flags of the command, and changes of the config for the search only.
        setup: in a pipeline of `tftpu launch`, shell functions that install the user's code.

    Returns:
        The best values, for the argument `best` of `train`.
    """
    import shlex

    from tftpu.launch.run import result

    words = ["search", f"--config={config}", f"--workdir={workdir}", f"--trials={trials}"]
    words += [f"--config.data.data_dir={data_dir}"] if data_dir else []
    words += [f"--space={text}" for text in space]
    _run_tftpu(words, f"{overrides} {flags}", setup)
    return shlex.join(result.read_search(workdir)["best"]["overrides"])


@_step
def train(
    config: str,
    workdir: str,
    run: dsl.Output[dsl.Model],
    data_dir: str = "",
    overrides: str = "",
    best: str = "",
    setup: str = "",
) -> None:
    """Trains a config, or resumes its run: `tftpu train`.

    Args:
        config: name of a config, or path of one in the image.
        workdir: folder of the run, on storage that outlasts the machine.
        run: the artifact that names that folder.
        data_dir: the folder of the data; "" uses that of the config.
        overrides: changes of the config, and other flags, as on the command line.
        best: the values that `search` returned.
        setup: in a pipeline of `tftpu launch`, shell functions that install the user's code.
    """
    words = ["train", f"--config={config}", f"--workdir={workdir}"]
    words += [f"--config.data.data_dir={data_dir}"] if data_dir else []
    _run_tftpu(words, f"{overrides} {best}", setup)
    _write_place(run, workdir, config=config)


@_step
def evaluate(
    workdir: str, metrics: dsl.Output[dsl.Metrics], config: str = "", setup: str = ""
) -> None:
    """Evaluates the best checkpoint of a run: `tftpu evaluate`.

    Args:
        workdir: folder of the run.
        metrics: the artifact with loss and metrics on the evaluation split; its file is the
            command's output.
        config: the path of the run's config in the image, if it is your own.
        setup: in a pipeline of `tftpu launch`, shell functions that install the user's code.
    """
    import json
    import os
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        path = os.path.join(scratch, "metrics.json")
        words = ["evaluate", f"--workdir={workdir}", f"--output={path}"]
        _run_tftpu([*words, *_format_code_flag(config)], "", setup)
        with open(path) as file:
            found = json.load(file)
        # The artifact may be in a mounted bucket, where files cannot be renamed.
        shutil.copyfile(path, metrics.path)
    metrics.metadata["step"] = found["step"]
    for name, value in found["metrics"].items():
        if value is not None:
            metrics.log_metric(name, value)


@dsl.component(base_image=IMAGE, install_kfp_package=False, additional_funcs=[find_unmet])
def gate(metrics: dsl.Input[dsl.Metrics], condition: str) -> None:
    """Ends the pipeline with a reason unless the metrics are good enough.

    Args:
        metrics: the metrics that `evaluate` has written.
        condition: "METRIC>=NUMBER" or "METRIC<=NUMBER"; several with commas in between.
    """
    import json
    import sys

    with open(metrics.path) as file:
        found = json.load(file)["metrics"]
    print(" ".join(f"{name}={value}" for name, value in found.items()), flush=True)
    try:
        reasons = find_unmet(condition, found)
    except ValueError as error:
        sys.exit(f"The gate {condition!r} cannot be read: {error}.")
    if reasons:
        sys.exit(f"The gate {condition} is not met, so nothing follows: {'; '.join(reasons)}.")


@_step
def export(
    workdir: str,
    output: str,
    model: dsl.Output[dsl.Model],
    config: str = "",
    flags: str = "",
    setup: str = "",
) -> None:
    """Exports the best checkpoint of a run: `tftpu export`.

    Args:
        workdir: folder of the run.
        output: the path of the export. Its ending chooses the format; without an ending, it is a
            SavedModel.
        model: the artifact that names that path.
        config: the path of the run's config in the image, if it is your own.
        flags: further flags of the command.
        setup: in a pipeline of `tftpu launch`, shell functions that install the user's code.
    """
    words = ["export", f"--workdir={workdir}", f"--to={output}"]
    _run_tftpu([*words, *_format_code_flag(config)], flags, setup)
    _write_place(model, output, run=workdir)


@_step
def predict(
    workdir: str,
    input: str,
    output: str,
    predictions: dsl.Output[dsl.Dataset],
    config: str = "",
    flags: str = "",
    setup: str = "",
) -> None:
    """Predicts records with the best checkpoint of a run: `tftpu predict`.

    Args:
        workdir: folder of the run.
        input: the input, such as "images:gs://BUCKET/new".
        output: folder of the predictions.
        predictions: the artifact that names that folder.
        config: the path of the run's config in the image, if it is your own.
        flags: further flags of the command.
        setup: in a pipeline of `tftpu launch`, shell functions that install the user's code.
    """
    words = ["predict", f"--workdir={workdir}", f"--input={input}", f"--output={output}"]
    _run_tftpu([*words, *_format_code_flag(config)], flags, setup)
    _write_place(predictions, output, input=input)
