"""What tests of flows are made of.

`FlowTester` drives one flow by hand: no database, no event loop, no clock. For tests with real parts there are
`orchestrator.testing.installation` and, for pytest, the plugin `orchestrator.testing.plugin`.
"""

from orchestrator.testing.tester import EXECUTION, NOON, Expected, FlowTester

__all__ = ["EXECUTION", "NOON", "Expected", "FlowTester"]
