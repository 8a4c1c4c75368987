"""Published step times, and the fit of preflight's prices to them."""
