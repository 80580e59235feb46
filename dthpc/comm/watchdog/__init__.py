"""Collectives that do not end: what each rank called, which rank did not come, and the end of a job that would hang."""
