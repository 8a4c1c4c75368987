"""Imports TensorFlow and Keras on import; only the server of `fork_server` imports this."""

from tftpu import quick_import

quick_import.import_keras()
