"""Reward backends: functions in local processes, or behind any URL; and the server side of the same functions."""
