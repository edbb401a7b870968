"""The daemon's memory: database, schema, lease, audit log."""
