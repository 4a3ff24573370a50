"""The job file: what a user may say (`settings`, `sim`), what is refused (`job`), and how it is read (`load`)."""
