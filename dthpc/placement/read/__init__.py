"""Readers of what tools and the kernel say of a node, one file per kind of source. Free of torch."""
