"""The public page of a run, the preview of a plan, and their pictures."""
