"""A backend without a model: deterministic tokens at a set speed, set failures, or exactly the events a test enqueues.

It behaves like a batching engine: one step produces a token for every running request, whatever their number.
A token's id is a function of prompt and position, and its text of its id, so any replica continues what another began.
"""

from backends.fake.answers import written
from backends.fake.backend import FakeBackend
from backends.fake.settings import FakeAgent, FakeCall, FakeFault, FakeSettings

__all__ = ["FakeAgent", "FakeBackend", "FakeCall", "FakeFault", "FakeSettings", "written"]
