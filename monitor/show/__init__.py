"""The status document, and the two places that show it: the terminal and the status page."""
