"""Which network the ranks use: reading interfaces and devices, deciding alike on all nodes, telling each library.

Free of torch, so that the doors can ask for a machine that one is not on.
"""
