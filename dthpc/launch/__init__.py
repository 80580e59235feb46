"""From a configuration to a started run: checks against the machine, plan, batch script, executors. Free of torch."""
