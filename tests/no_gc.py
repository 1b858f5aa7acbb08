"""The first import of the fork server of ranks: what it imports is not searched for garbage."""

import gc

gc.disable()
