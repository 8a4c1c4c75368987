"""Iterators of tf.data end at once where their tuning is switched off."""

import os
import time

import pytest
import tensorflow as tf

from tftpu.engines.data import tuning


def build_dataset() -> tf.data.Dataset:
    return tf.data.Dataset.range(10**9).map(lambda x: x + 1, num_parallel_calls=tf.data.AUTOTUNE)


@pytest.mark.medium
def test_an_iterator_that_lived_for_seconds_is_deleted_at_once(monkeypatch):
    """With tuning, one of eight takes a second or more."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    iterators = [iter(tuning.limit_tuning(build_dataset())) for _ in range(8)]
    end = time.monotonic() + 2
    while time.monotonic() < end:
        for iterator in iterators:
            next(iterator)
        time.sleep(0.05)
    began = time.monotonic()
    del iterators, iterator
    assert time.monotonic() - began < 0.8


@pytest.mark.parametrize(("cores", "tuned"), [(2, False), (16, False), (96, None)])
def test_many_cores_are_tuned(monkeypatch, cores, tuned):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert tuning.limit_tuning(build_dataset()).options().autotune.enabled is tuned


def test_who_asks_for_tuning_gets_it(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    options = tf.data.Options()
    options.autotune.enabled = True
    assert tuning.limit_tuning(build_dataset().with_options(options)).options().autotune.enabled
