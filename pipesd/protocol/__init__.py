"""The wire and the two state machines that speak it: events in, actions out, no I/O."""
