"""Translation between wire dialects and one vocabulary. Pure: no I/O, no clock, no ids, no engine, no Ray."""
