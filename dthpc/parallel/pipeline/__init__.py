"""Pipeline parallelism: schedules as data, their checks, and the one runtime that executes them."""
