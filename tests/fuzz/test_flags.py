"""Any words on the command line are options or one clear error."""

from hypothesis import strategies as st

from tests.support.hostile.fuzzing import fuzzed, only_user_errors
from tftpu.launch import main
from tftpu.launch.settings import config_flags
from tftpu.launch.settings.options import list_flags
from tftpu.launch.settings.parsing import parse, to_argv

COMMANDS = main.load_commands()
_ODD = (
    *("", " ", "=", "-", "--", "-1", "0", "1e400", "nan", "inf", "none", "true", "²", "\ud800"),
    *("()", "(1,2)", "(1,(2))", "[" * 200, "'", '"', "\x00", "../..", "gs://", "s3://a", "9" * 40),
    *("__import__('os')", "{'a': 1}", "é" * 300, "1_000", "0x10", "1.5"),
)
VALUES = st.sampled_from(_ODD) | st.text(max_size=12) | st.integers().map(str)


@st.composite
def command_lines(draw):
    """Draws a command and words for it, most of which name flags that it has."""
    name = draw(st.sampled_from(sorted(COMMANDS)))
    flags = [flag.name for flag in list_flags(COMMANDS[name].options)]
    names = st.sampled_from([*flags, "no" + flags[0]] if flags else ["x"]) | st.text(max_size=6)
    pairs = st.builds("--{}={}".format, names, VALUES) | st.builds("--{}".format, names)
    return name, draw(st.lists(pairs | VALUES, max_size=4))


@fuzzed(150, line=command_lines())
def test_options(line):
    name, words = line
    options = COMMANDS[name].options
    with only_user_errors():
        found = parse(name, options, words)
        # What is accepted is written and parsed again unchanged.
        assert parse(name, options, to_argv(found)) == found


FIELDS = (
    *("model.width", "model.blocks", "model.norm_batch", "model.dropout", "model.num_classes"),
    *("data.global_batch_size", "data.name", "data.data_dir", "optimizer.learning_rate"),
    *("optimizer.name", "optimizer.decay_steps", "optimizer.warmup_steps", "train.steps"),
    *("train.epochs", "train.precision", "train.writers", "train.profile", "train.seed"),
    *("train.global_clipnorm", "train.watchdog_seconds", "cluster.tpu", "cluster.virtual_devices"),
    *("loss", "metrics", "optimizer", "callbacks", "model", "", "train.", "x.y.z"),
)


@fuzzed(150, field=st.sampled_from(FIELDS) | st.text(max_size=8), value=VALUES)
def test_fields_of_a_config(field, value):
    with only_user_errors():
        config_flags.load("digits_resnet", [f"--config.{field}={value}"]).validate()
