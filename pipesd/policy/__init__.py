"""What decides: pure code without sockets, models, threads or clocks."""
