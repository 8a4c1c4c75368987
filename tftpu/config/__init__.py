"""The dataclasses of an experiment: validation, JSON in and out."""

from tftpu.config.data import Data, DataContext
from tftpu.config.experiment import (
    DECAYS,
    OPTIMIZERS,
    SCALINGS,
    Cluster,
    Experiment,
    Optimizer,
)
from tftpu.config.fields import OPERATIONAL, operational_fields
from tftpu.config.model import Model
from tftpu.config.objects import Function, KerasObject
from tftpu.config.options import ON_NAN, PRECISIONS, WRITERS, Train, TrainOptions
from tftpu.config.profile_plan import ProfilePlan, profile_plan
from tftpu.config.serialization import (
    find_unreadable,
    find_unreadable_classes,
    from_json,
    to_json,
    to_plain,
)
from tftpu.config.share import Share
from tftpu.config.validation import check_types, declared_types

__all__ = [
    "DECAYS",
    "ON_NAN",
    "OPERATIONAL",
    "OPTIMIZERS",
    "PRECISIONS",
    "SCALINGS",
    "WRITERS",
    "Cluster",
    "Data",
    "DataContext",
    "Experiment",
    "Function",
    "KerasObject",
    "Model",
    "Optimizer",
    "ProfilePlan",
    "Share",
    "Train",
    "TrainOptions",
    "check_types",
    "declared_types",
    "find_unreadable",
    "find_unreadable_classes",
    "from_json",
    "operational_fields",
    "profile_plan",
    "to_json",
    "to_plain",
]
