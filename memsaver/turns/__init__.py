"""The turns of a group, whatever carries the calls to its ranks: members, phases, and the two halves of a turn."""
