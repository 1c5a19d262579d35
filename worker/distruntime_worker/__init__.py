"""The worker daemon: owns the real tensors and runs what the master's log says."""
