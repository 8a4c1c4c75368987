"""The dataclasses of an experiment, their validation, and their conversion from and to JSON."""

from typing import TYPE_CHECKING

from tftpu.config import renamed
from tftpu.config.data import DataConfig, DataContext
from tftpu.config.experiment import (
    DECAYS,
    OPTIMIZERS,
    SCALINGS,
    ClusterConfig,
    Experiment,
    OptimizerConfig,
)
from tftpu.config.field_types import FieldType, read_fields, read_type
from tftpu.config.fields import OPERATIONAL, operational_fields
from tftpu.config.model import ModelConfig
from tftpu.config.objects import Function, KerasObject
from tftpu.config.options import ON_NAN, PRECISIONS, WRITERS, TrainConfig
from tftpu.config.per_replica_batch import PerReplicaBatch
from tftpu.config.profile_plan import ProfilePlan, profile_plan
from tftpu.config.serialization import (
    find_unreadable,
    find_unreadable_classes,
    from_json,
    to_json,
    to_plain,
)
from tftpu.config.validation import check_types

__all__ = [
    "DECAYS",
    "ON_NAN",
    "OPERATIONAL",
    "OPTIMIZERS",
    "PRECISIONS",
    "SCALINGS",
    "WRITERS",
    "ClusterConfig",
    "DataConfig",
    "DataContext",
    "Experiment",
    "FieldType",
    "Function",
    "KerasObject",
    "ModelConfig",
    "OptimizerConfig",
    "PerReplicaBatch",
    "ProfilePlan",
    "TrainConfig",
    "check_types",
    "find_unreadable",
    "find_unreadable_classes",
    "from_json",
    "operational_fields",
    "profile_plan",
    "read_fields",
    "read_type",
    "to_json",
    "to_plain",
]


if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept any name

    def __getattr__(name: str) -> object:
        raise renamed.explain_missing(__name__, name)
