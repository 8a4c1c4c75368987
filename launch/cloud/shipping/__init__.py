"""The files that travel to a rented machine: tftpu, the user's code, and versions of packages."""
