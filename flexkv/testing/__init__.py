"""For tests of flexkv and of its plug-ins; needs the `test` extra. Start with `faults`."""
