"""Which rank a process is, and where it stands among the others. Free of torch."""
