"""A bucket that is away for a while: the run trains on, and nothing is lost."""

import json
import logging
import shutil
import time

import keras
import pytest

from tests.support.fakes import gs_proxy
from tests.support.fakes.fake_storage import BUCKET, Fault
from tests.support.models.training import compiled, data, make_trainer
from tftpu.errors import UserError
from tftpu.storage import lines, retry

STEPS = 60


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with gs_proxy.bucket(tmp_path_factory.mktemp("certificates")) as (service, _):
        yield service


class Outage(keras.callbacks.Callback):
    """Takes the service away at one step, and back at another; notes the time of each step."""

    def __init__(self, service, first: int, last: int):
        super().__init__()
        self._service, self._first, self._last = service, first, last
        self.times: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations.numpy())
        self.times.append(time.monotonic())
        if step == self._first:
            faults = [Fault(m, ".", 503, times=None) for m in ("GET", "POST", "PUT", "DELETE")]
            self._service.faults += faults
        if step == self._last:
            time.sleep(1.0)  # what waits for the service has noticed
            self.times[-1] = time.monotonic()
            self._service.faults.clear()


@pytest.mark.slow
def test_a_run_trains_on_while_its_bucket_is_away_and_loses_no_line(service, monkeypatch, caplog):
    """The bucket is away for 30 lines of metrics; each would have waited for all retries."""
    monkeypatch.setattr(retry, "POLICY", retry.Policy(5.0, first_wait=0.2, longest_wait=1.0))
    monkeypatch.setattr(lines, "SECONDS", 0.0)
    outage = Outage(service, 20, 50)
    trainer = make_trainer(compiled(), f"gs://{BUCKET}/away", log_every=1, steps_per_loop=1)
    with caplog.at_level(logging.WARNING):
        trainer.fit(data(), steps=STEPS, callbacks=[outage], verbose=0)
    between = [b - a for a, b in zip(outage.times[20:49], outage.times[21:50], strict=True)]
    assert sum(between) < 5.0, between
    found = [json.loads(line) for line in service.content("away/metrics.jsonl").splitlines()]
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    assert f"away/checkpoints/{STEPS}/manifest.json" in service.names()
    logged = service.content("away/train.log").decode().splitlines()
    assert sum("train step" in line for line in logged) == STEPS


@pytest.mark.medium
def test_a_deleted_workdir_ends_the_run_with_a_clear_error(tmp_path):
    workdir = tmp_path / "run"

    class Delete(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations.numpy() == 10:
                while workdir.exists():  # a file may be written while the others are removed
                    shutil.rmtree(workdir, ignore_errors=True)

    trainer = make_trainer(compiled(), workdir, log_every=5, steps_per_loop=5)
    with pytest.raises(UserError, match="deleted while this run was writing to it"):
        trainer.fit(data(), steps=40, callbacks=[Delete()], verbose=0)
    assert not workdir.exists()
