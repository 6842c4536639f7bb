"""Bridges to inference engines. The paths below are imported by the engines themselves: keep them."""
