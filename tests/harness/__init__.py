"""Parts that tests share: processes, jobs, replicas, checkpoints, and the table of tolerances."""
