"""What keys and values of other tools are called here, for a run file that has them."""
