"""Scripts that call `fit` with what the exact step cannot divide, or what others leave to Keras.

Each module has `FITS`, scripts by name.
"""
