"""What two processes must agree on, bit for bit. Pure data: no I/O, no clock, no torch."""
