"""One file per dataset format."""
