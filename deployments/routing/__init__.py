"""Routing decisions as pure modules: no Ray, no I/O, no clock of their own."""
