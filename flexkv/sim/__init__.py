"""The simulator: the brain that serves, on a virtual clock, over servers with real figures."""
