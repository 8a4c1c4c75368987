"""A real TFX pipeline, whose Trainer is tftpu's; outside CI, as TFX needs what few systems have."""
