"""``python -m halftone.compare``: halftone beside every other attention package that can be imported here.

Every participant gets the same inputs and the same timing, and its result is held against double precision. A package
that is absent is listed as absent; one that cannot do a case says why.
"""
