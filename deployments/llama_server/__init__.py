"""`tokenyard-llama-server`: takes llama-server's command line and serves one model in one process, without Ray."""
