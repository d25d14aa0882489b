"""What was measured, on 2 cores (x86-64, shared), Python 3.11.7, Ray 2.60.0, and how: all that the extrapolation knows.

What comes from `benchmarks.scaling.controller` are straight lines through 5, 20 and 40 replicas.
"""

from __future__ import annotations

from typing import Final

import msgspec


class Inputs(msgspec.Struct, frozen=True):
    """Seconds of CPU and bytes."""

    # python -m benchmarks.scaling.controller (0.035, 0.050 and 0.052 cores at 9.4 turns/s, nobody's stats changing)
    turn_s: float = 3.7e-3
    """A turn of the control loop with no replica."""
    turn_per_replica_s: float = 50e-6
    """With health checks, questions for stats and reports for autoscaling, though not all of it is done in turns."""
    # The same, stats changing: 2.4, 4.4 and 5.4 ms more for each list to one gateway; 1.6 ms for each gateway more.
    list_s: float = 1.1e-3
    list_per_replica_s: float = 61e-6
    sent_s: float = 1.1e-3
    """Sending a list to a gateway, without what its length costs."""
    # A gateway's: 2.1, 2.4 and 3.3 ms for each list.
    received_s: float = 1.9e-3
    received_per_replica_s: float = 33e-6

    # python -m benchmarks.scaling.costs: a list of replicas, for each in it
    bytes_per_replica: float = 620.0
    list_per_template_byte_s: float = 2.0e-9
    sent_per_replica_s: float = 9.5e-6
    sent_per_template_byte_s: float = 1.3e-9
    held_up_per_replica_s: float = 18e-6
    """Of what a gateway does with a list, that in which no stream goes on: Python runs one thread at a time."""
    # The same: messages of the step channel, at a replica
    ask_s: float = 7.0e-6
    intent_s: float = 0.9e-6
    digest_s: float = 10.0e-6
    digest_bytes: int = 3833
    """Of 200 requests that landed elsewhere, the most there can be."""
    connection_bytes: float = 6200.0
    """Both ends together."""

    # python -m benchmarks.router.cost: one decision among 1,000 replicas, with the key of 32 KB
    decision_s: float = 0.23e-3
    # make bench-relay: all of the server's processes, HAProxy's and the replica's part included
    token_s: float = 0.143e-3

    def list_bytes(self, replicas: int, template_bytes: int) -> float:
        return replicas * (self.bytes_per_replica + template_bytes)

    def made_s(self, replicas: int, template_bytes: int) -> float:
        """The controller's, once for each list."""
        return self.list_s + replicas * (self.list_per_replica_s + template_bytes * self.list_per_template_byte_s)

    def sending_s(self, replicas: int, template_bytes: int) -> float:
        """The controller's, for each list and gateway."""
        return self.sent_s + replicas * (self.sent_per_replica_s + template_bytes * self.sent_per_template_byte_s)

    def receiving_s(self, replicas: int) -> float:
        """A gateway's, for each list."""
        return self.received_s + replicas * self.received_per_replica_s


INPUTS: Final = Inputs()
