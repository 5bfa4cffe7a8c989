"""A rollout engine and a trainer that take turns on one device through memsaver."""
