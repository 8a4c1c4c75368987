"""The request of `tftpu launch vertex-search`: a hyper-parameter tuning job of Vertex AI.

The specification is a dictionary with the field names of the service's REST interface
(https://cloud.google.com/vertex-ai/docs/reference/rest/v1/projects.locations.hyperparameterTuningJobs).
The service appends the parameters of a trial to the arguments of its container, as
`--PARAMETER=VALUE` or `--PARAMETER VALUE`, so the parameters have the names of overrides.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

from tftpu.config import Experiment
from tftpu.config.keras_names import smaller_is_better
from tftpu.errors import UserError, did_you_mean
from tftpu.launch.cloud import job
from tftpu.launch.cloud.vertex.training_job import VertexJob
from tftpu.launch.cloud.vertex.trials import CONFIG
from tftpu.launch.search.space import Dimension
from tftpu.launch.settings import config_flags
from tftpu.launch.settings.parsing import OVERRIDE

Spec = dict[str, Any]  # JSON with the field names of the REST interface

ALGORITHMS = {
    "bayesian": "ALGORITHM_UNSPECIFIED",  # the service's default algorithm
    "random": "RANDOM_SEARCH",
    "grid": "GRID_SEARCH",
}
PRUNERS = {
    "none": {},
    "median": {"medianAutomatedStoppingSpec": {"useElapsedDuration": False}},
    "decay_curve": {"decayCurveStoppingSpec": {"useElapsedDuration": False}},
}
_OWN = {
    "cluster": "tftpu checks the slice of all trials, and installs the engine for it",
    "train.writers": "the trials report their metrics through it",
}
_CLOSEST = 1e-10  # numeric values of a choice must differ by more than this
_MOST = 1000  # maximum number of numeric values in a choice
_MOST_TRIALS = 2**31 - 1  # the largest number of trials that fits the field, an int32
# Lines of bash that build the flags of a trial. Its folder is named after its number, so a
# preempted trial resumes. Vertex AI's TensorBoard reads the folder `logs` in it.
_TRIAL = """\
trial="${AIP_CHECKPOINT_DIR%%/}"
trial="${trial%%/checkpoints}"
arguments+=("$@" "--workdir=$trial%s")"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VertexSearch:
    """A hyper-parameter search to create.

    Attributes:
        order: the custom job that each trial runs, with its project, its slice and its files.
        space: the fields to search, and the values that they may take.
        experiment: the experiment that has these fields.
        metric: the evaluation metric by which trials are compared.
        trials: the number of trials.
        parallel: the number of trials that run at a time.
        algorithm: one of `ALGORITHMS`.
        pruner: one of `PRUNERS`.
    """

    order: VertexJob
    space: Sequence[Dimension]
    experiment: Experiment
    metric: str
    trials: int
    parallel: int
    algorithm: str
    pruner: str

    def build_tuning_job(self) -> Spec:
        """Returns the HyperparameterTuningJob to create, under a unique name.

        Raises:
            UserError: Vertex AI would reject a value of the search, or cannot express it.
        """
        self._check()
        name = job.make_unique_name(self.order.config)
        return {
            "displayName": name,
            "maxTrialCount": self.trials,
            "parallelTrialCount": self.parallel,
            "studySpec": self._build_study(),
            "trialJobSpec": self.order.build_job_spec(
                self._build_container(), self.resolve_folder(name)
            ),
            "labels": self.order.build_labels(),
        }

    def resolve_folder(self, name: str) -> str:
        """Returns the folder of a job's trials, which no other job uses."""
        return f"{self.order.workdir}/{name}"

    def as_yaml(self, created: Spec) -> str:
        """Formats the job as a file for `gcloud`, with the command that reads it in a comment."""
        file = {key: created[key] for key in created if key not in ("displayName", "labels")}
        return self.order.format_for_gcloud("hp-tuning-jobs", created, file)

    def _build_study(self) -> Spec:
        goal = "MINIMIZE" if smaller_is_better(self.metric) else "MAXIMIZE"
        return {
            "metrics": [{"metricId": self.metric, "goal": goal}],
            "parameters": build_parameters(self.space, self.experiment),
            "algorithm": ALGORITHMS[self.algorithm],
            # A trial's value is that of the checkpoint that it keeps as the best one.
            "measurementSelectionType": "BEST_MEASUREMENT",
            **PRUNERS[self.pruner],
        }

    def _build_container(self) -> dict[str, Any]:
        """Returns a container's command, arguments (the service adds more) and environment."""
        writers = dict.fromkeys([*self.experiment.train.writers, "hypertune"])
        order = self.order
        before = _TRIAL % ("/logs" if order.tensorboard else "")
        command = job.build_container_command(order.shipment, order.workdir, [], before=before)
        arguments = [
            *order.overrides,
            f"--config.train.best_metric={self.metric}",
            f"--config.train.writers=({','.join(writers)})",
            "--tpu=local",
        ]
        return {
            "command": [*command, "tftpu"],  # bash takes the word "tftpu" as $0
            "args": arguments,
            "env": [{"name": CONFIG, "value": order.config}],
        }

    def _check(self) -> None:
        for name, known in (("algorithm", ALGORITHMS), ("pruner", PRUNERS)):
            value = getattr(self, name)
            if value not in known:
                raise UserError(
                    f"--{name}={value}: choose {', '.join(known)}.{did_you_mean(value, known)}"
                )
        if re.search(r"\s", self.metric):
            raise UserError(
                f"--metric={self.metric}: on Vertex AI, the name of a metric must not contain a "
                "space."
            )
        if self.trials > _MOST_TRIALS:
            raise UserError(f"--trials={self.trials}: Vertex AI takes at most {_MOST_TRIALS:,}.")
        if self.parallel > self.trials:
            raise UserError(
                f"--parallel={self.parallel} is more than --trials={self.trials}: give a smaller "
                "number."
            )
        once = self.experiment.train.epochs is None and not self.experiment.train.eval_every
        if self.pruner != "none" and once:
            raise UserError(
                f"--pruner={self.pruner} compares trials while they train, but these trials are "
                "evaluated only at their end: add --config.train.eval_every=STEPS."
            )
        for dimension in self.space:
            self._check_dimension(dimension)

    def _check_dimension(self, dimension: Dimension) -> None:
        field = dimension.field
        for own, why in _OWN.items():
            if field == own or field.startswith(f"{own}."):
                raise UserError(
                    f"--space: {field} must be the same in all trials on Vertex AI: {why}."
                )
        if dimension.kind == "choice":
            return
        if self.algorithm == "grid" and not dimension.whole:
            raise UserError(
                f"--algorithm=grid tries every value, but {field} may be any number from "
                f"{dimension.low:g} to {dimension.high:g}: write {field}=choice:A,B."
            )


def build_parameters(space: Sequence[Dimension], experiment: Experiment) -> list[Spec]:
    """Returns the ParameterSpecs of a space; a conditional one is nested in that of its parent.

    Args:
        space: the dimensions; each comes after the one on which it depends.
        experiment: the experiment that has their fields.

    Raises:
        UserError: a choice has more numbers than Vertex AI allows, or numbers too close together.
    """
    made: dict[str, Spec] = {}
    roots = []
    for dimension in space:
        spec = made[dimension.field] = _build_parameter(dimension, experiment)
        if dimension.only_if is None:
            roots.append(spec)
            continue
        parent, value = dimension.only_if
        condition = {"parentCategoricalValues": {"values": [value]}}
        if "discreteValueSpec" in made[parent]:
            condition = {"parentDiscreteValues": {"values": [float(value)]}}
        inside = made[parent].setdefault("conditionalParameterSpecs", [])
        inside.append({**condition, "parameterSpec": spec})
    return roots


def _build_parameter(dimension: Dimension, experiment: Experiment) -> Spec:
    spec: Spec = {"parameterId": f"{OVERRIDE}{dimension.field}"}
    if dimension.kind == "choice":
        numbers = _parse_numbers(dimension, experiment)
        if numbers:
            return {**spec, "discreteValueSpec": {"values": numbers}}
        return {**spec, "categoricalValueSpec": {"values": list(dimension.choices)}}
    scale = "UNIT_LOG_SCALE" if dimension.kind == "log" else "UNIT_LINEAR_SCALE"
    if dimension.whole:
        bounds: Spec = {"minValue": int(dimension.low), "maxValue": int(dimension.high)}
        return {**spec, "integerValueSpec": bounds, "scaleType": scale}
    bounds = {"minValue": dimension.low, "maxValue": dimension.high}
    return {**spec, "doubleValueSpec": bounds, "scaleType": scale}


def _parse_numbers(dimension: Dimension, experiment: Experiment) -> list[float]:
    """Returns the values of a choice as sorted numbers; [] if one of them is not a number."""
    field = dimension.field
    values = [
        config_flags.parse_override(experiment, f"--config.{field}={text}")
        for text in dimension.choices
    ]
    if any(type(value) not in (int, float) for value in values):
        return []
    found = sorted(map(float, values))
    if any(after - before <= _CLOSEST for before, after in itertools.pairwise(found)):
        raise UserError(
            f"--space: two values of {field} are so close that Vertex AI cannot tell them apart: "
            f"they must differ by more than {_CLOSEST:g}. Write {field}=log:LOW..HIGH."
        )
    if len(found) > _MOST:
        raise UserError(
            f"--space: {field} has {len(found)} values, but Vertex AI takes at most {_MOST}."
        )
    return found
