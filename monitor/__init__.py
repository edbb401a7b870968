"""The daemon and the command line, in rooms: each imports only from the rooms below it (`pyproject.toml` holds the order)."""
