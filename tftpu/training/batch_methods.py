"""Finds out whether callbacks have methods for batches, such as `on_train_batch_end`."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras

from tftpu.engines import keras_internals


def watches_batches(callbacks: Iterable[keras.callbacks.Callback], phase: str) -> bool:
    """Returns whether any of the callbacks has batch methods, such as `on_train_batch_end`.

    Args:
        callbacks: the callbacks.
        phase: "train", "test" or "predict", as in the methods' names.
    """
    names = [f"on_{phase}_batch_begin", f"on_{phase}_batch_end"]
    names += ["on_batch_begin", "on_batch_end"] if phase == "train" else []
    return any(_watches(callback) and _has(callback, names) for callback in callbacks)


def _watches(callback: Any) -> bool:
    """Returns whether a callback uses batch methods; Keras's own use them in some settings."""
    kinds = keras.callbacks
    for kind in (kinds.ModelCheckpoint, kinds.BackupAndRestore):
        if isinstance(callback, kind) and not _replaces_batch_methods(callback, kind):
            return callback.save_freq != "epoch"
    if isinstance(callback, kinds.TensorBoard) and not _replaces_batch_methods(
        callback, kinds.TensorBoard
    ):
        return callback.update_freq != "epoch" or keras_internals.traces_batches(callback)
    return not isinstance(callback, kinds.ProgbarLogger | kinds.History)


def _replaces_batch_methods(callback: Any, kind: type) -> bool:
    """Returns whether a callback's class overrides a batch method of `kind`, its base class."""
    names = [name for name in dir(kind) if "batch" in name and name.startswith("on_")]
    return any(getattr(type(callback), name) is not getattr(kind, name) for name in names)


def _has(callback: keras.callbacks.Callback, names: Sequence[str]) -> bool:
    """Returns whether a callback overrides one of the named methods of Keras's `Callback`."""
    plain = keras.callbacks.Callback
    return any(
        getattr(getattr(callback, name), "__func__", None) is not getattr(plain, name)
        for name in names
    )
