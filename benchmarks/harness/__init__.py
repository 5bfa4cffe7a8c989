"""Common parts: command line, processes, the machine, work and its contents, limits, savers, pools, engine servers."""
