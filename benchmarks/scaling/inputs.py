"""What was measured, on 2 cores (x86-64, shared), Python 3.11.7, Ray 2.60.0, and how: the only figures that the
extrapolation has. Lines through them are straight; what they say of 1,000 replicas nobody has seen.
"""

from __future__ import annotations

from typing import Final

import msgspec


class Inputs(msgspec.Struct, frozen=True):
    """Seconds of CPU and bytes, unless it says otherwise."""

    # python -m benchmarks.scaling.controller: the controller with replicas that do nothing, a line through their number
    idle_cores: float = 0.04
    """What the controller takes without any replica."""
    cores_per_replica: float = 0.004
    """Health checks, questions for stats, reports for autoscaling."""
    turn_s: float = 0.002
    turn_per_replica_s: float = 0.0001
    """Of the above: what the control loop does for each replica in every turn."""

    # python -m benchmarks.scaling.costs: a list of replicas, per replica in it
    bytes_per_replica: float = 600.0
    build_per_replica_s: float = 10e-6
    build_per_template_byte_s: float = 5e-9
    pickle_per_replica_s: float = 13e-6
    unpickle_per_replica_s: float = 8e-6
    update_per_replica_s: float = 10e-6
    """A gateway's: what our router and Serve's do with a list."""
    ask_s: float = 7.0e-6
    intent_s: float = 0.9e-6
    digest_s: float = 9.7e-6
    """These three are a replica's."""
    ask_bytes: int = 241
    reply_bytes: int = 38
    intent_bytes: int = 36
    digest_bytes: int = 3833
    """Of 200 requests that landed elsewhere, the most there can be."""
    connection_bytes: float = 10_000.0
    """Both ends together."""

    # python -m benchmarks.router.cost: one decision among 1,000 replicas, key included
    decision_s: float = 0.2e-3
    # make bench-relay: all the server's processes, HAProxy's and the replica's part included
    token_s: float = 0.22e-3

    def list_bytes(self, replicas: int, template_bytes: int) -> float:
        return replicas * (self.bytes_per_replica + template_bytes)

    def build_s(self, replicas: int, template_bytes: int) -> float:
        return replicas * (self.build_per_replica_s + template_bytes * self.build_per_template_byte_s)

    def pickle_s(self, replicas: int) -> float:
        return replicas * self.pickle_per_replica_s

    def received_s(self, replicas: int) -> float:
        """A gateway's, for one list: in one turn of its event loop, or of the thread that routers run on."""
        return replicas * (self.unpickle_per_replica_s + self.update_per_replica_s)

    def arrivals_s(self, replicas: int) -> float:
        """Cores for what replicas send and answer outside the control loop's turns."""
        return replicas * max(self.cores_per_replica - 10 * self.turn_per_replica_s, 0.0)


INPUTS: Final = Inputs()
