"""Examines the nodes of a job: measures each, compares them, names those that would hold the others up."""
