"""What belongs to a run, after restarts, rollbacks and takeovers: its identities, and the choice of
the snapshot that it resumes from.

- The *run id* (`identity`) names a run for good. It lies in the folder of the run, and each
  replica derives its own from it.
- A *generation* is one start of all ranks of a replica. Regions of shared memory carry its id, so
  that a snapshot is never put together from the parts of two starts.
- A *segment* (`lineage`) is a stretch of training that continues one state. A resume from an older
  step begins another one, and the steps that it abandons do not count any more.
- A *fencing token* (`fencing_tokens`) is what a quorum of replicas claims before its first step, so
  that replicas that lose each other do not continue the run twice.
- A *position* (`snapshot_index`) is a segment and a step: later segments count more.

A generation id is not derived from the others because processes start before they know what they
resume, and a segment is not a token because a run without replicas has segments, too.
"""
