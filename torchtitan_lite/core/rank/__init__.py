"""What a rank and its supervisor owe each other: heartbeats, notices, processes."""
