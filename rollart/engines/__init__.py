"""Engines: whatever takes tokens and gives tokens. Each adapter here implements `rollart.ports.Engine`."""
