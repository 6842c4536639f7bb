"""Codecs: blocks in fewer bytes, for tiers where room or bandwidth is dear.

`quant` (int8, int4: lossy, native) - `lossless` (byte planes and zstd) - `layout` (where the values
of a KVSpec lie) - `rows` (what the door's arrays must look like).
"""
