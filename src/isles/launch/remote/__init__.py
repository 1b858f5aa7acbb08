"""Before a start elsewhere: isles on a login node, copying files, installing."""
