"""Stand-ins for models and links, and the checker of event logs; part of the product, used by tests and benches."""
