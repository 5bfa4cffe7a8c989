"""The parts that a run adds to the loop, which knows none of them. checked_loop: the checks of each step, the log, the
verdict. checked_actors: the methods that these need. recovery: dead actors, with checkpoints: the states of a run.
"""
