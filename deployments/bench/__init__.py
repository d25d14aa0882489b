"""`tokenyard bench`: what clients get from an OpenAI-compatible server under load. Knows nothing of our own server."""
