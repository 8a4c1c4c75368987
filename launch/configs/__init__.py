"""The configs that come with tftpu; `get_config()` of each returns an `Experiment`."""
