"""Decisions: pure functions and state machines. They never wait and never touch the world."""
