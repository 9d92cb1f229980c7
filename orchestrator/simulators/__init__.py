"""Others, simulated: an endpoint that misbehaves as it is told, and providers that post webhooks as they do.

For tests of those who use us, as `waypost simulate`, as fixtures of `orchestrator.testing.plugin`, or as they are.
"""
