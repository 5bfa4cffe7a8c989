"""The turns of a group, without the transport of its calls: members, phases, and the two halves of a turn."""
