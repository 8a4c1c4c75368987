"""The command line: `tftpu COMMAND --flag=value`.

A command's flags are checked, and its config is loaded and validated, before TensorFlow loads.
Exit codes: 0 done, 2 the user's mistake (one sentence), 1 our mistake (a traceback), 75 stopped
and safely saved: run it again, 69 another host of the run was lost, 124 the run hung (--watchdog).
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

from absl import flags

from tftpu.config import Experiment
from tftpu.errors import HostLost, Preempted, UserError, did_you_mean
from tftpu.launch import config_flags, failures
from tftpu.observe import logs
from tftpu.runtime.preemption import PREEMPTED
from tftpu.version import __version__

USER_ERROR = 2
HOST_LOST = 69  # EX_UNAVAILABLE


class Command(NamedTuple):
    """A command: what it does, the module whose `run` does it, and its flags."""

    help: str
    module: str
    flags: tuple[str, ...] = ()
    tensorflow: bool = True
    needs_config: bool = True
    remote: bool = False  # runs elsewhere: is given the config as written, and the overrides
    argument: str = ""  # what follows the command's name without dashes, if anything does
    several: bool = False  # of that: a list


_RUN = ("config", "workdir", "tpu", "virtual_devices")
_TPU_VM = (
    *("config", "slice", "zone", "workdir", "package", "project", "service_account", "labels"),
    *("queue_timeout", "preflight", "spot", "keep", "yes", "dry_run"),
)
_VERTEX = (
    *("config", "slice", "workdir", "image", "project", "region", "service_account"),
    *("tensorboard", "timeout", "labels", "spot", "detach", "dry_run"),
)
_CONVERT = (
    *("source", "output", "split", "seed", "shard_mb", "min_shards", "compression", "workers"),
    *("staging", "data_dir", "features", "tokenizer", "end_of_text", "context", "field"),
    *("snapshot", "runner", "beam_options"),
)
COMMANDS = {
    "train": Command(
        "train a config, or go on with a run", "commands.train", (*_RUN, "restarts", "watchdog")
    ),
    "evaluate": Command("evaluate the best checkpoint of a run", "commands.evaluate", _RUN[1:]),
    "preflight": Command(
        "compile a config for TPU slices, without a TPU: does it fit, how fast, what cost",
        "commands.preflight",
        (
            *("config", "workdir", "slices", "json", "explain", "price", "verbose"),
            "time_limit",
        ),
    ),
    "export-weights": Command(
        "write the best weights of a run, without the optimizer",
        "commands.export_weights",
        ("workdir", "to"),
    ),
    "bench": Command(
        "time a config's step, its input pipeline and both",
        "commands.bench",
        ("config", "tpu", "virtual_devices", "compare"),
    ),
    "doctor": Command(
        "say what is installed, attached and wrong here, and the command that mends it",
        "commands.doctor",
        ("config", "workdir", "json"),
        tensorflow=False,
        needs_config=False,
    ),
    "data convert": Command(
        "make TFRecord shards of any source, shuffled, with a manifest",
        "commands.data_convert",
        _CONVERT,
    ),
    "data check": Command(
        "check a config's data before a run: shapes, shards, memory, and whether it is fast enough",
        "commands.data_check",
        ("config", "workdir", "hosts", "need", "zone"),
    ),
    "data show": Command(
        "draw training examples, after augmentation, to a PNG; or print packed text",
        "commands.data_show",
        ("config", "output", "examples", "step"),
    ),
    "data verify": Command(
        "read every record of a data set, and compare it with its manifest",
        "commands.data_verify",
        ("workers",),
        argument="folder",
    ),
    "status": Command(
        "say how runs stand: step, speed, time left, where the time went",
        "commands.status",
        ("json",),
        tensorflow=False,
        argument="workdirs",
        several=True,
    ),
    "plot": Command(
        "draw the curves of runs into one picture",
        "commands.plot",
        ("output", "metrics", "log"),
        tensorflow=False,
        argument="workdirs",
        several=True,
    ),
    "profile": Command(
        "say what a run's newest profile shows, or compare those of two runs",
        "commands.profile",
        tensorflow=False,
        argument="workdirs",
        several=True,
    ),
    "configs": Command("list the configs", "commands.configs", tensorflow=False),
    "launch tpu-vm": Command(
        "rent a slice, train a config on it, give it back",
        "cloud.tpu_vm",
        _TPU_VM,
        tensorflow=False,
        remote=True,
    ),
    "launch vertex": Command(
        "train a config on Vertex AI", "cloud.vertex", _VERTEX, tensorflow=False, remote=True
    ),
}


def _define(values: flags.FlagValues, command: Command) -> None:
    define = {"flag_values": values}
    flags.DEFINE_string("config", None, "name of a config, or path of your own", **define)
    flags.DEFINE_string(
        "workdir", None, "where the run lives; runs/<config> if not given", **define
    )
    flags.DEFINE_string("to", None, "file to write: .weights.h5 or .safetensors", **define)
    flags.DEFINE_string("tpu", "auto", "auto, local, none, or the name of a TPU", **define)
    flags.DEFINE_integer("virtual_devices", None, "split the CPU into so many devices", **define)
    flags.DEFINE_integer(
        "restarts", 0, "start a crashed run again, at most so often", lower_bound=0, **define
    )
    flags.DEFINE_float(
        "watchdog",
        None,
        "end a run that does no step for so many seconds",
        lower_bound=1,
        **define,
    )
    flags.DEFINE_string("slices", "v3-8,v5e-8", "TPU slices to compare, as v3-8,v5e-8", **define)
    flags.DEFINE_boolean("explain", False, "show where the time goes, layer by layer", **define)
    flags.DEFINE_string("price", "", "dollars for a chip-hour, as v5e=1.10,v3=1.50", **define)
    flags.DEFINE_boolean("verbose", False, "show what the TPU compiler writes", **define)
    flags.DEFINE_integer("time_limit", 1800, "seconds for one compile", **define)
    flags.DEFINE_string("slice", "v3-8", "TPU slice, as v5e-4", **define)
    flags.DEFINE_string("image", None, "container image made from launch/Dockerfile", **define)
    flags.DEFINE_string("project", None, "Google Cloud project", **define)
    flags.DEFINE_integer("hosts", 1, "hosts that will share a batch", lower_bound=1, **define)
    flags.DEFINE_float("need", None, "examples a second that the TPU takes", **define)
    flags.DEFINE_string("zone", None, "zone of Google Cloud, as us-west4-a", **define)
    flags.DEFINE_string(
        "package", None, "what pip installs there, or a wheel in a bucket; this tftpu", **define
    )
    flags.DEFINE_string("queue_timeout", "24h", "how long to wait for capacity", **define)
    flags.DEFINE_string("preflight", None, "JSON of tftpu preflight, for the total", **define)
    flags.DEFINE_boolean("keep", False, "leave the slice after the run", **define)
    flags.DEFINE_boolean("yes", False, "do not ask whether to rent it", **define)
    flags.DEFINE_string("region", "us-central1", "region of Google Cloud", **define)
    flags.DEFINE_string("service_account", None, "e-mail address that the job runs as", **define)
    flags.DEFINE_string("tensorboard", None, "resource name of a TensorBoard", **define)
    flags.DEFINE_string("timeout", "7d", "the job ends after this: 90m, 24h, 7d", **define)
    flags.DEFINE_string("labels", "", "labels besides tftpu's own: key=value,key=value", **define)
    flags.DEFINE_boolean("compare", False, "time Keras's own fit as well", **define)
    if command.module == "commands.preflight":
        flags.DEFINE_string("json", None, "also write the report to this file", **define)
    else:
        flags.DEFINE_boolean("json", False, "print JSON, for programs", **define)
    flags.DEFINE_boolean("spot", False, "cheaper machines, which may be preempted", **define)
    flags.DEFINE_boolean("detach", False, "do not wait for the end of the job", **define)
    flags.DEFINE_string(
        "source", None, "KIND:WHAT; tfds, images, index, text, tfrecord, bigquery", **define
    )
    if command.module == "commands.plot":
        flags.DEFINE_string("output", "curves.png", "the picture: .png, .svg or .pdf", **define)
        flags.DEFINE_string("metrics", "", "metrics to draw, as loss,accuracy; all", **define)
        flags.DEFINE_boolean("log", False, "logarithmic axes where values are positive", **define)
    elif command.module == "commands.data_show":
        sheet = "the picture, a .png; CONFIG_examples.png if not given"
        flags.DEFINE_string("output", None, sheet, **define)
    else:
        flags.DEFINE_string("output", None, "folder of the data set, local or gs://", **define)
    flags.DEFINE_integer("examples", None, "how many; 24 images or 3 rows of text", **define)
    flags.DEFINE_integer("step", 0, "of training, which the examples belong to", **define)
    flags.DEFINE_string("split", "train", "name of the split; of tfds also NAME=SPLIT", **define)
    flags.DEFINE_integer("seed", 0, "of the shuffle", **define)
    flags.DEFINE_float("shard_mb", 150, "about the size of a shard, in MiB", **define)
    flags.DEFINE_integer("min_shards", 1, "at least so many: one for each host", **define)
    flags.DEFINE_string("compression", "", "GZIP, or nothing", **define)
    flags.DEFINE_integer("workers", 0, "processes; 0: one for each core", **define)
    flags.DEFINE_string("staging", None, "local folder for records on their way", **define)
    flags.DEFINE_string("data_dir", None, "where TFDS's data sets lie", **define)
    flags.DEFINE_string("features", "", "of tfds, tfrecord, bigquery: the wanted ones", **define)
    flags.DEFINE_string("tokenizer", None, "of text: a tokenizer.json; else bytes", **define)
    flags.DEFINE_string("end_of_text", None, "of text: token after each document", **define)
    flags.DEFINE_integer("context", 1024, "of text: tokens of a sequence", **define)
    flags.DEFINE_string("field", "text", "of JSON lines: what holds the text", **define)
    flags.DEFINE_string("snapshot", None, "of bigquery: time of the rows, ISO 8601", **define)
    flags.DEFINE_string("runner", None, "of Apache Beam, as DataflowRunner", **define)
    flags.DEFINE_string("beam_options", "", "for that runner, as '--project=P'", **define)
    flags.DEFINE_boolean("dry_run", False, "print what would be sent, and send nothing", **define)


def run() -> None:
    """The console script: exits with the code that `main` returns."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: list[str]) -> int:
    """Runs a command.

    Args:
        arguments: what follows `tftpu` on the command line.

    Returns:
        The exit code.
    """
    logs.set_up()
    try:
        if not arguments or arguments[0] in ("help", "-h", "--help", "-help", "--helpfull"):
            print(usage())
            return 0
        if arguments[0] in ("version", "--version"):
            print(f"tftpu {__version__}")
            return 0
        _run_command(*arguments)
        return 0
    except UserError as error:
        print(f"tftpu: {error}", file=sys.stderr)
        return USER_ERROR
    except Preempted as stopped:
        print(f"tftpu: {stopped}", file=sys.stderr)
        return PREEMPTED
    except HostLost as lost:
        print(f"tftpu: {lost}", file=sys.stderr)
        return HOST_LOST
    except KeyboardInterrupt:
        print("tftpu: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `tftpu configs | head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        explanation = failures.explain(error)
        if explanation is None:
            raise
        print(f"tftpu: {explanation}", file=sys.stderr)
        return USER_ERROR


def usage(command: str | None = None) -> str:
    """The help text of a command, or of all."""
    if command is None:
        rows = [f"  {name:16}{c.help}" for name, c in COMMANDS.items()]
        return "\n".join(
            [
                "usage: tftpu COMMAND [--flag=value ...]",
                "",
                *rows,
                "",
                "  tftpu COMMAND --help   the flags of a command",
                "  tftpu train --config=digits_resnet   is a good first one",
            ]
        )
    values = flags.FlagValues()
    spec = COMMANDS[command]
    _define(values, spec)
    rows = [f"  --{name:16}{values[name].help}" for name in spec.flags]
    if "config" in spec.flags:
        rows.append(
            "  --config.GROUP.FIELD=VALUE   any field of the config, as --config.train.steps=500"
        )
    argument = f"{spec.argument.upper()} " if spec.argument else ""
    head = f"usage: tftpu {command} {argument}[--flag=value ...]"
    return "\n".join([head, f"  {spec.help}", "", *rows])


def _run_command(name: str, *arguments: str) -> None:
    second = [key.split()[1] for key in COMMANDS if key.startswith(f"{name} ")]
    if second and arguments and not arguments[0].startswith("-"):  # as in `launch vertex`
        name, arguments = f"{name} {arguments[0]}", arguments[1:]
    if name in {key.split()[0] for key in COMMANDS} and name not in COMMANDS:
        raise UserError(f"tftpu {name} needs one of {', '.join(second)} after it.")
    if name not in COMMANDS:
        raise UserError(f"There is no command {name!r}.{did_you_mean(name, COMMANDS)}")
    if any(argument in ("-h", "--help", "-help", "--helpfull") for argument in arguments):
        print(usage(name))
        return
    command = COMMANDS[name]
    words = [a for a in arguments if not a.startswith("-")]
    options = [a for a in arguments if a.startswith("-")]
    if words[1 if command.argument else 0 :] and not command.several:
        raise UserError(f"tftpu {name} takes flags only, as --flag=value, and got {words[-1]!r}.")
    if command.argument and not words:
        raise UserError(f"tftpu {name} needs the {command.argument}: tftpu {name} DIR.")
    values, overrides = _parse(command, options)
    keywords = {flag: values[flag].value for flag in command.flags}
    if command.argument:
        keywords[command.argument] = words if command.several else words[0]
    if "config" in command.flags:
        keywords["experiment"] = _experiment(name, keywords, overrides)
        if command.remote:
            keywords["overrides"] = overrides
        elif keywords["config"]:
            keywords["config"] = config_name(keywords["config"])
    elif overrides:
        raise UserError(f"tftpu {name} takes no --config: it uses the workdir's own.")
    if command.tensorflow:
        require_tensorflow()
    if keywords.pop("restarts", 0):
        _supervise(name, arguments, keywords, values["restarts"].value)
    _function(command.module)(**keywords)


def _supervise(name: str, arguments: tuple[str, ...], keywords: dict, restarts: int) -> None:
    """Runs the command in a process of its own, which is started again if it crashes."""
    from tftpu.launch import supervise
    from tftpu.launch.commands import train

    again = [a for a in arguments if a.lstrip("-").partition("=")[0] != "restarts"]
    command = [sys.executable, "-m", "tftpu.launch.main", name, *again]
    workdir = keywords["workdir"] or train.default_workdir(keywords["config"])
    sys.exit(supervise.run(command, workdir, restarts))


def _parse(command: Command, options: list[str]) -> tuple[flags.FlagValues, list[str]]:
    def is_override(option: str) -> bool:
        return option.lstrip("-").startswith("config.")

    values = flags.FlagValues()
    _define(values, command)
    overrides = [option for option in options if is_override(option)]
    for option in options:
        flag = option.lstrip("-").partition("=")[0]
        if is_override(option):
            continue
        if flag.removeprefix("no") not in command.flags and flag not in command.flags:
            raise UserError(f"There is no flag --{flag} here.{did_you_mean(flag, command.flags)}")
        if "=" not in option and not values[flag.removeprefix("no")].boolean:
            raise UserError(f"--{flag} has no value: write --{flag}=VALUE.")
    try:
        values(["tftpu", *(option for option in options if not is_override(option))])
    except flags.IllegalFlagValueError as error:
        # "flag --virtual_devices=x: invalid literal ..."
        raise UserError(str(error).partition(": ")[0] + " is not a value that it takes.") from error
    return values, overrides


def _experiment(command: str, keywords: dict, overrides: list[str]) -> Experiment | None:
    if not keywords["config"]:
        if not COMMANDS[command].needs_config and not overrides:
            return None
        known = ", ".join(config_flags.names())
        raise UserError(f"tftpu {command} needs --config=NAME; there are {known}.")
    experiment = config_flags.load(keywords["config"], overrides)
    experiment.cluster.tpu = keywords.get("tpu", experiment.cluster.tpu)
    experiment.cluster.virtual_devices = keywords.get(
        "virtual_devices", experiment.cluster.virtual_devices
    )
    experiment.validate()
    return experiment


def config_name(config: str) -> str:
    """The name of a config, also of one given by its path."""
    return os.path.basename(config).removesuffix(".py")


def require_tensorflow() -> None:
    """Raises `UserError`, with the command to run, if no TensorFlow is installed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # chatter of the C++ side
    if importlib.util.find_spec("tensorflow") is None:
        raise UserError(
            "TensorFlow is not installed, on purpose: choose the one for this machine. Run "
            "`pip install 'tftpu[cpu]'`, or [gpu], or [tpu] on a TPU VM, Colab or Kaggle."
        )


def _function(module: str) -> Callable[..., None]:
    return importlib.import_module(f"tftpu.launch.{module}").run


if __name__ == "__main__":
    run()
