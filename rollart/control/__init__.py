"""Drivers: asyncio coroutines that carry out what `policy` decides, through `ports` only."""
