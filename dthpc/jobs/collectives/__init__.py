"""The job that measures collectives by backend, group, operation and size, and says what is slow and where."""
