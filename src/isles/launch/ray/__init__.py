"""The launcher ray: `start.py` submits a job to a Ray cluster, `jobs.py` asks how it stands, and
`driver.py` is that job: it has Ray place an actor on each node, which runs the agent.
"""
