"""The files that are sent to a rented machine: tftpu, the user's code, and package versions."""
