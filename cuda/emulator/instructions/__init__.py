"""Instruction families; importing this package registers their handlers."""
