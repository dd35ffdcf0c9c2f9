"""Parts of a step beside forward, backward and update: the totals over ranks, the decision about
the step, and what follows an anomaly."""
