"""Hosts in network namespaces, shaped links, emulated hosts for unchanged members; verify and clean
up."""
