"""Faults injected into a throwaway run, and the proof that every step of the response followed."""
