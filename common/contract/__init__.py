"""The definitions that two processes must share exactly. Pure data: no I/O, no clock, no torch."""
