"""Tests of memsaver; shared helpers are in support.py."""
