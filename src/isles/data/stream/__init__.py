"""Sources that are streamed: prepared a segment ahead by a process of the node, then forgotten."""
