"""A cluster's end of the hub: HTTPS, files that go on where they were cut off."""
