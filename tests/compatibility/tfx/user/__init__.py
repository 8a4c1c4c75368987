"""What a user of TFX writes."""
