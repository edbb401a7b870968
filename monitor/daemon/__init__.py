"""The process: its jobs, the watched run, what it serves, its settings."""
