"""Options of a pool: budgets, reservations, stable addresses, idle decay, the debug mode."""
