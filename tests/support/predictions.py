"""Predictions of a small model, whose weights are known, written in shards."""

import numpy as np

import tftpu
from tests.support.models.training import compiled, examples, make_trainer
from tftpu.config import DataContext
from tftpu.inference.predict import Job
from tftpu.inference.prediction.outputs import build_columns
from tftpu.input_pipelines import unlabelled
from tftpu.input_pipelines.formats import results

COUNT = 96


X = examples(COUNT)[0]


def trainer_of(model=None) -> tftpu.Trainer:
    return make_trainer(compiled(model))


def of_known_weights(model):
    rng = np.random.default_rng(0)
    model.set_weights([rng.normal(size=value.shape) for value in model.get_weights()])
    return model


def records(batch: int = 16) -> unlabelled.UnlabelledRecords:
    return unlabelled.from_arrays(X, DataContext(0, batch), "x", {"place": np.arange(COUNT) * 2})


def job(folder, **changes) -> Job:
    columns = build_columns(["logits"], False, None)
    given = {"format": "jsonl", "encode": results.jsonl, "columns": columns, "plan": {"of": "x"}}
    return Job(str(folder), **{**given, "records_per_shard": 20, **changes})
