"""Commands about one config."""
