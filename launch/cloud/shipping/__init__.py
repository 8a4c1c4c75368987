"""What travels to a rented machine: tftpu, the user's code, and the versions of packages."""
