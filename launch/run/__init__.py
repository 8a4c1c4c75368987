"""One run: how it is built from an experiment, trained, ended, and used afterwards."""
