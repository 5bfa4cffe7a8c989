"""Python imports this at its start, also in the child of the test, since this folder is in PYTHONPATH."""

import stand_ins

stand_ins.install()
