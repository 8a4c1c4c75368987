"""The use of trained models: writing text, prediction, export and serving."""
