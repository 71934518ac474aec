"""The edge: a draft model, a session with the cloud, and the program `pipesd-edge`."""
