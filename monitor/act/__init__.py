"""What leaves the daemon towards the trainer, and what people decide: directives, their delivery, approvals."""
