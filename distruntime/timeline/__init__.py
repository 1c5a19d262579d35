"""A session's timeline: what the master, the wire and the workers did when, and why that was slow."""
