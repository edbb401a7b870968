"""Lines and files to arrays: telemetry as it grows, and the logs of other trainers."""
