"""Everything that works on torch tensors. Importing this package does not import torch; its modules do."""
