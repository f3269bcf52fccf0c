"""The reports of a pool: hooks, histories, statistics, traces."""
