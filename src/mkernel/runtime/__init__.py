"""The host side: groups, topology, the symmetric heap, launches, configuration, errors."""
