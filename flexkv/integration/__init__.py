"""Bridges to inference engines. Engines import the paths below themselves: keep them."""
