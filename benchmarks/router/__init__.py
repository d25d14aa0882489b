"""Routing in simulation: the production policy beside other routers' rules, on public traces and generated load."""
