"""Train one cell: the definition of an update, its optimizers and schedules, its records."""
