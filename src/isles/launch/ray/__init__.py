"""The launcher ray: `start.py` submits a job to a Ray cluster, `jobs.py` queries its state, and
`driver.py` is the job: it makes Ray start an actor on each node, and the actor runs the agent."""
