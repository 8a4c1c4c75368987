"""Iterators of tf.data end at once where their tuning is switched off."""

import os
import time

import pytest
import tensorflow as tf

import tftpu
from tftpu.engines.data import tuning
from tftpu.engines.tensorflow import feed


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


def test_the_iterators_of_several_devices_are_not_tuned(monkeypatch):
    """Each device prefetches by an iterator, which lacks the options of the user's data set.

    Whether such an iterator is deleted late is a matter of luck: after a run of 92 s on 8 devices
    it took 73 s.
    """
    switched: list[tf.data.Dataset] = []
    off = tuning.switch_tuning_off
    monkeypatch.setattr(
        feed, "switch_tuning_off", lambda d: switched.append(off(d)) or switched[-1]
    )
    strategy = tftpu.connect(virtual_devices=8).strategy
    iterator = feed.iterate(feed.distribute(build_dataset().batch(8), strategy))
    assert [dataset.options().autotune.enabled for dataset in switched] == [False] * 8
    assert len(strategy.experimental_local_results(next(iterator))) == 8
