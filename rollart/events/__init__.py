"""What happened in a run: `schema` has the kinds of events, `log` writes and reads them, `metrics` sums values up."""
