"""What the measurements mean: generators of findings, one file for each subject."""
