"""The run card: read, validated with lines, and what checks and nodes are told of it."""
