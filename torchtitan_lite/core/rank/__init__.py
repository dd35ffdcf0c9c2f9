"""Interface between a rank and its supervisor: heartbeats, supervision, processes."""
