"""The dataclasses of an experiment: validation, JSON in and out."""

from tftpu.config.experiment import (
    DECAYS,
    OPTIMIZERS,
    SCALINGS,
    Cluster,
    Data,
    Experiment,
    Model,
    Optimizer,
)
from tftpu.config.options import ON_NAN, PRECISIONS, WRITERS, Train, TrainOptions
from tftpu.config.profile_plan import ProfilePlan, profile_plan
from tftpu.config.serialization import from_json, to_json
from tftpu.config.share import Share
from tftpu.config.validation import check_types

__all__ = [
    "DECAYS",
    "ON_NAN",
    "OPTIMIZERS",
    "PRECISIONS",
    "SCALINGS",
    "WRITERS",
    "Cluster",
    "Data",
    "Experiment",
    "Model",
    "Optimizer",
    "ProfilePlan",
    "Share",
    "Train",
    "TrainOptions",
    "check_types",
    "from_json",
    "profile_plan",
    "to_json",
]
