"""One run: built from its experiment, trained, ended, and used afterwards."""
