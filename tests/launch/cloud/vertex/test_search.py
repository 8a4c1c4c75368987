"""`tftpu launch vertex-search`: the request, and a trial that is started as Vertex AI starts it."""

import json

import pytest
import yaml
from google.cloud import aiplatform_v1 as v1
from google.protobuf import json_format

from tests.support.fakes.rented_machine import RentedMachine
from tests.support.messages import check_message
from tftpu.launch import main
from tftpu.launch.cloud.vertex import search
from tftpu.launch.commands.training import train
from tftpu.launch.search import space
from tftpu.launch.settings import config_flags
from tftpu.launch.settings.parsing import parse

FLAGS = (
    *("--config=digits_resnet", "--slice=v5e-1", "--workdir=gs://b/s", "--project=p"),
    *("--space=optimizer.learning_rate=log:1e-3..1", "--metric=accuracy", "--dry_run"),
)
Parameter = v1.StudySpec.ParameterSpec
Scale = Parameter.ScaleType


def launch(capsys, *flags: str) -> str:
    """Returns the standard output of `tftpu launch vertex-search`, which must succeed."""
    code = main.main(["launch", "vertex-search", *FLAGS, *flags])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def printed(capsys, *flags: str) -> v1.HyperparameterTuningJob:
    """Returns the job of a dry run, as the service's own message."""
    kind = v1.HyperparameterTuningJob
    return kind(json_format.ParseDict(yaml.safe_load(launch(capsys, *flags)), kind.pb(kind())))


def parameters(*texts: str) -> list[Parameter]:
    """Returns the parameters of a space, as the service's own messages."""
    experiment = config_flags.load("digits_resnet", [])
    found = search.build_parameters(space.parse(texts, experiment), experiment)
    return [Parameter(json_format.ParseDict(one, Parameter.pb(Parameter()))) for one in found]


def test_the_printed_yaml_is_a_tuning_job(capsys):
    job = printed(
        capsys,
        *("--trials=9", "--parallel=3", "--algorithm=random", "--pruner=median", "--spot"),
        *("--timeout=90m", "--config.train.steps=5"),
    )
    assert (job.max_trial_count, job.parallel_trial_count) == (9, 3)
    study = job.study_spec
    (metric,) = study.metrics
    assert (metric.metric_id, metric.goal.name) == ("accuracy", "MAXIMIZE")
    assert study.algorithm == v1.StudySpec.Algorithm.RANDOM_SEARCH
    assert "median_automated_stopping_spec" in study
    best = v1.StudySpec.MeasurementSelectionType.BEST_MEASUREMENT
    assert study.measurement_selection_type == best
    (pool,) = job.trial_job_spec.worker_pool_specs
    assert pool.machine_spec.machine_type == "ct5lp-hightpu-1t"
    assert list(pool.container_spec.args) == [
        "--config.train.steps=5",
        "--config.train.best_metric=accuracy",
        "--config.train.writers=(hypertune)",
        "--tpu=local",
    ]
    scheduling = job.trial_job_spec.scheduling
    assert scheduling.restart_job_on_worker_restart and scheduling.timeout.seconds == 5400
    assert scheduling.strategy == v1.Scheduling.Strategy.SPOT


def test_without_choices_of_a_user_the_service_decides(capsys):
    study = printed(capsys, "--metric=loss").study_spec
    assert study.metrics[0].goal.name == "MINIMIZE"
    assert study.algorithm == v1.StudySpec.Algorithm.ALGORITHM_UNSPECIFIED
    assert not study._pb.WhichOneof("automated_stopping_spec")


def test_the_first_line_is_the_command_that_takes_the_yaml(capsys):
    first = launch(capsys, "--labels=team=vision").splitlines()[0]
    assert first.startswith("# gcloud ai hp-tuning-jobs create --config=FILE --project=p ")
    assert "--display-name=digits-resnet-" in first and "team=vision" in first


def test_a_number_is_a_range_with_its_scale():
    rate, smoothing, width = parameters(
        "optimizer.learning_rate=log:1e-4..1e-1",
        "train.label_smoothing=uniform:0..0.2",
        "model.width=log:8..64",
    )
    assert rate.parameter_id == "config.optimizer.learning_rate"
    bounds = rate.double_value_spec
    assert (bounds.min_value, bounds.max_value, rate.scale_type) == (
        1e-4,
        0.1,
        Scale.UNIT_LOG_SCALE,
    )
    assert smoothing.scale_type == Scale.UNIT_LINEAR_SCALE
    whole = width.integer_value_spec
    assert (whole.min_value, whole.max_value, width.scale_type) == (8, 64, Scale.UNIT_LOG_SCALE)


def test_a_choice_of_numbers_keeps_their_order_and_any_other_is_one_of_texts():
    width, blocks, ema, on_nan = parameters(
        "model.width=choice:32,8,16",
        "model.blocks=choice:(1,1),(2,2)",
        "train.ema_momentum=choice:none,0.9",
        "train.on_nan=choice:stop,rollback",
    )
    assert list(width.discrete_value_spec.values) == [8, 16, 32]
    assert list(blocks.categorical_value_spec.values) == ["(1,1)", "(2,2)"]
    assert list(ema.categorical_value_spec.values) == ["none", "0.9"]
    assert list(on_nan.categorical_value_spec.values) == ["stop", "rollback"]


def test_a_condition_puts_a_parameter_inside_of_another():
    (name,) = parameters(
        "train.on_nan=choice:stop,rollback",
        "train.max_rollbacks=choice:2,4 if train.on_nan=rollback",
        "train.ema_momentum=uniform:0.9..0.99 if train.max_rollbacks=4",
    )
    (inside,) = name.conditional_parameter_specs
    assert list(inside.parent_categorical_values.values) == ["rollback"]
    assert inside.parameter_spec.parameter_id == "config.train.max_rollbacks"
    (last,) = inside.parameter_spec.conditional_parameter_specs
    assert list(last.parent_discrete_values.values) == [4.0]
    assert last.parameter_spec.parameter_id == "config.train.ema_momentum"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--config.optimizer.learning_rate=0.5"], "sets a field of the space"),
        (["--config.train.best_metric=loss"], "and --metric=accuracy name different metrics"),
        (
            ["--space=optimizer.name=choice:sgd,adamww"],
            "optimizer.name=adamww cannot be trained with",
        ),
        (
            ["--space=cluster.engine=choice:jax,tensorflow"],
            "cluster.engine must be the same in all",
        ),
        (["--space=train.best_metric=choice:loss,accuracy"], "set it with --metric"),
        (["--algorithm=grid"], "write optimizer.learning_rate=choice:A,B"),
        (["--algorithm=grit"], "choose bayesian, random, grid. Did you mean 'grid'?"),
        (["--pruner=mean"], "choose none, median, decay_curve. Did you mean 'median'?"),
        (["--space=train.label_smoothing=choice:0,1e-11"], "two values of"),
        (["--space=train.keep=uniform:1..99999999999999999"], "beyond 2^53"),
        (["--space=train.grace_seconds=uniform:1..inf"], "inf is not a number"),
        (["--metric=my loss", "--config.metrics=mae"], "must not contain a space"),
        (["--pruner=median", "--config.train.eval_every=0"], "add --config.train.eval_every="),
        (["--metric=acuracy"], "has only loss, accuracy. Did you mean 'accuracy'?"),
        (["--trials=2147483648"], "at most 2,147,483,647"),
        (["--trials=2", "--parallel=3"], "--parallel=3 is more than --trials=2"),
        (["--slice=v4-8"], "is not a slice for custom jobs of Vertex AI"),
        (["--workdir=runs/mine"], "write gs://BUCKET/FOLDER"),
        (["--space=optimizer.rate=log:1e-3..1"], "has no field 'rate'"),
    ],
)
def test_what_vertex_ai_cannot_express_and_mistakes_fail_with_one_clear_line(capsys, flags, says):
    assert main.main(["launch", "vertex-search", *FLAGS, *flags]) == 2
    check_message(capsys.readouterr().err, says)


def test_a_search_needs_a_space_and_an_evaluation(capsys, tmp_path):
    flags = [flag for flag in FLAGS if not flag.startswith("--space")]
    assert main.main(["launch", "vertex-search", *flags]) == 2
    assert "There is nothing to search" in capsys.readouterr().err
    (tmp_path / "mine.py").write_text(
        "import dataclasses\nimport tftpu\n"
        "@dataclasses.dataclass\nclass Own(tftpu.DataConfig):\n    pass\n"
        "@dataclasses.dataclass\nclass Net(tftpu.ModelConfig):\n    pass\n"
        "def get_config():\n    return tftpu.Experiment(Net(), Own(), optimizer='adam')\n"
    )
    words = ["--space=data.global_batch_size=choice:64,128", "--dry_run", "--slice=v5e-1"]
    assert main.main(["launch", "vertex-search", f"--config={tmp_path}/mine.py", *words]) == 2
    assert "Own has none" in capsys.readouterr().err


def started(machine: RentedMachine, spec, chosen: list[str], trial: str) -> list[str]:
    """Starts a container as the service starts that of a trial; returns the words of tftpu."""
    container = spec.worker_pool_specs[0].container_spec
    output = f"{spec.base_output_directory.output_uri_prefix}/{trial}"
    (machine.folder / "arguments").unlink(missing_ok=True)
    said = machine.run(
        [*container.command, *container.args, *chosen],
        TFTPU_GCS=str(machine.bucket),
        AIP_CHECKPOINT_DIR=f"{output}/checkpoints/",
    )
    assert (machine.code, said) == (0, "trained\n")
    return machine.arguments()


def sent(machine: RentedMachine, capsys, *flags: str) -> v1.HyperparameterTuningJob:
    """Returns a job whose files are in the bucket of a machine."""
    from tftpu.launch.cloud.shipping import shipment

    job = printed(capsys, "--workdir=gs://b/s", *flags)
    files = shipment.pack("digits_resnet", None)
    machine.put(files.resolve_address("gs://b/s"), files.files)
    return job


@pytest.mark.parametrize("form", ["--{}={}", "--{} {}"])
def test_a_trials_parameters_are_overrides_in_both_forms_of_the_services_documentation(
    tmp_path, capsys, form
):
    machine = RentedMachine(tmp_path)
    job = sent(machine, capsys, "--config.train.writers=mlflow")
    values = {"config.optimizer.learning_rate": "0.015625", "config.model.blocks": "(1,1)"}
    chosen = [word for item in values.items() for word in form.format(*item).split(" ")]
    name, *words = started(machine, job.trial_job_spec, chosen, "3")
    assert name == "train"
    options = parse("train", train.Options, words)
    folder = job.trial_job_spec.base_output_directory.output_uri_prefix
    assert options.workdir == f"{folder}/3" and folder.startswith("gs://b/s/digits-resnet-")
    experiment = options.load_experiment()
    assert experiment.optimizer.learning_rate == 0.015625
    assert experiment.model.blocks == (1, 1)
    assert experiment.train.best_metric == "accuracy"
    assert experiment.train.writers == ("mlflow", "hypertune")


@pytest.mark.medium
def test_no_two_trials_and_no_two_jobs_share_a_workdir(tmp_path, capsys):
    machine = RentedMachine(tmp_path)
    jobs = [sent(machine, capsys) for _ in range(2)]
    words = [started(machine, job.trial_job_spec, [], trial) for job in jobs for trial in "12"]
    assert len({word for line in words for word in line if "--workdir=" in word}) == 4
    again = started(machine, jobs[0].trial_job_spec, [], "1")  # after a preemption
    assert again == words[0]


def test_tensorboard_reads_the_folder_that_a_trial_writes(tmp_path, capsys):
    board = "--tensorboard=projects/p/locations/l/tensorboards/1"
    machine = RentedMachine(tmp_path)
    spec = sent(machine, capsys, board, "--service_account=s@p").trial_job_spec
    # AIP_TENSORBOARD_LOG_DIR, as the service defines it.
    output = f"{spec.base_output_directory.output_uri_prefix}/2/logs"
    assert f"--workdir={output}" in started(machine, spec, [], "2")


@pytest.mark.slow
def test_a_trial_trains_and_reports_to_the_agent(tmp_path, capsys, monkeypatch):
    job = printed(capsys)
    file = tmp_path / "output.metrics"
    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", str(file))
    monkeypatch.setenv("CLOUD_ML_TRIAL_ID", "5")
    tiny = ["--config.train.eval_every=4", "--config.model.blocks=(1,)", "--config.model.width=8"]
    tiny += ["--config.model.norm_batch=8", "--config.data.global_batch_size=16"]
    args = job.trial_job_spec.worker_pool_specs[0].container_spec.args
    here = [word for word in args if word != "--tpu=local"]
    words = [*here, *tiny, "--config.optimizer.learning_rate=0.015625", "--tpu=none"]
    for steps in (8, 12):  # a run that resumes
        more = [f"--config.train.steps={steps}", f"--workdir={tmp_path}/5"]
        assert main.main(["train", "--config=digits_resnet", *words, *more]) == 0
    lines = [json.loads(line) for line in (tmp_path / "5" / "metrics.jsonl").open()]
    expected = [(x["step"], x["accuracy"]) for x in lines if x["split"] == "eval"]
    assert [step for step, _ in expected] == [4, 8, 12]
    reported = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(int(r["global_step"]), float(r["accuracy"])) for r in reported] == expected
    assert {r["trial"] for r in reported} == {"5"}
