"""Imports TensorFlow and Keras when it is imported, as only the server of `fork_server` does."""

from tftpu import quick_import

quick_import.import_keras()
