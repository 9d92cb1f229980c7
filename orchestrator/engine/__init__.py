"""Turns: what a claim, a journal, mail and time become, and how it is committed."""
