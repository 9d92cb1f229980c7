"""A pure function of a journal: what a flow asks for next, given what has become of what it asked before.

No clock, no chance, no I/O and no event loop; importing any of them here fails the build.
"""
