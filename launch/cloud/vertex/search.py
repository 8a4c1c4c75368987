"""The request of `tftpu launch vertex-search`: a hyper-parameter tuning job of Vertex AI.

The specification is a dictionary with the names of the service's REST interface
(https://cloud.google.com/vertex-ai/docs/reference/rest/v1/projects.locations.hyperparameterTuningJobs).
The service appends the parameters of a trial to the arguments of its container, as
`--PARAMETER=VALUE` or `--PARAMETER VALUE`: their names are those of overrides.
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
from tftpu.launch.settings.options import OVERRIDE

Spec = dict[str, Any]  # with the names of the REST interface

ALGORITHMS = {
    "bayesian": "ALGORITHM_UNSPECIFIED",  # the service's own
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
    "train.writers": "the trials report by it",
}
_CLOSEST = 1e-10  # numbers to choose from differ by more
_MOST = 1000  # of them
_MOST_TRIALS = 2**31 - 1  # that the service's message can hold
# Lines of bash for the flags of a trial. Its folder is named by its number, so that a trial which
# is preempted resumes; Vertex AI's TensorBoard reads `logs` in there.
_TRIAL = """\
trial="${AIP_CHECKPOINT_DIR%%/}"
trial="${trial%%/checkpoints}"
arguments+=("$@" "--workdir=$trial%s")"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VertexSearch:
    """A search to create.

    Attributes:
        order: who pays, where the trials run, and what travels to them.
        space: fields, and the values that they may take.
        experiment: that they are fields of.
        metric: of the evaluation, by which trials are compared.
        trials: number of them.
        parallel: number of trials at a time.
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
        """Returns the HyperparameterTuningJob to create, under a name that no other job has.

        Raises:
            UserError: a value that Vertex AI would reject, or cannot express.
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
        """Returns the folder of the trials of a job: no two jobs share one."""
        return f"{self.order.workdir}/{name}"

    def as_yaml(self, created: Spec) -> str:
        """Formats the job for `gcloud`, below the command that takes it."""
        file = {key: created[key] for key in created if key not in ("displayName", "labels")}
        return self.order.format_for_gcloud("hp-tuning-jobs", created, file)

    def _build_study(self) -> Spec:
        goal = "MINIMIZE" if smaller_is_better(self.metric) else "MAXIMIZE"
        return {
            "metrics": [{"metricId": self.metric, "goal": goal}],
            "parameters": build_parameters(self.space, self.experiment),
            "algorithm": ALGORITHMS[self.algorithm],
            # That of the checkpoint which is kept as the best.
            "measurementSelectionType": "BEST_MEASUREMENT",
            **PRUNERS[self.pruner],
        }

    def _build_container(self) -> dict[str, Any]:
        """Returns the command of a trial's container, and the arguments that those are added to."""
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
            "command": [*command, "tftpu"],  # bash takes the word for $0
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
                f"--metric={self.metric}: Vertex AI takes no name of a metric with a space in it."
            )
        if self.trials > _MOST_TRIALS:
            raise UserError(f"--trials={self.trials}: Vertex AI takes at most {_MOST_TRIALS:,}.")
        if self.parallel > self.trials:
            raise UserError(
                f"--parallel={self.parallel} is more than --trials={self.trials}: give less."
            )
        once = self.experiment.train.epochs is None and not self.experiment.train.eval_every
        if self.pruner != "none" and once:
            raise UserError(
                f"--pruner={self.pruner} compares trials while they train, and these are evaluated "
                "at the end only: add --config.train.eval_every=STEPS."
            )
        for dimension in self.space:
            self._check_dimension(dimension)

    def _check_dimension(self, dimension: Dimension) -> None:
        field = dimension.field
        for own, why in _OWN.items():
            if field == own or field.startswith(f"{own}."):
                raise UserError(f"--space: {field} is the same in all trials on Vertex AI: {why}.")
        if dimension.kind == "choice":
            return
        if self.algorithm == "grid" and not dimension.whole:
            raise UserError(
                f"--algorithm=grid tries every value, and {field} may be any number from "
                f"{dimension.low:g} to {dimension.high:g}: write {field}=choice:A,B."
            )


def build_parameters(space: Sequence[Dimension], experiment: Experiment) -> list[Spec]:
    """Returns the ParameterSpecs of a space; those with a condition are inside their parents.

    Args:
        space: dimensions, those on which others depend first.
        experiment: that they are fields of.

    Raises:
        UserError: numbers to choose from that Vertex AI cannot tell from one another.
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
    """Returns the numbers to choose from, in their order; none if a value is not a number."""
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
            f"--space: Vertex AI cannot tell two values of {field} from one another, which have to "
            f"differ by more than {_CLOSEST:g}: write {field}=log:LOW..HIGH."
        )
    if len(found) > _MOST:
        raise UserError(f"--space: {field} has {len(found)} values, and Vertex AI takes {_MOST}.")
    return found
