"""How one reward function is executed: here, on an event loop or in a worker; its limits, its cache, its failures."""
