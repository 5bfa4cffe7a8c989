"""Tests of memsaver; what several files share is in support.py."""
