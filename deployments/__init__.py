"""Requests over HTTP to backends in Ray Serve replicas. The only package that imports Ray."""
