"""Ray clusters, tasks and jobs, the local stack, and the wheel shipped to a cluster."""
