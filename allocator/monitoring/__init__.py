"""What a pool reports: hooks, histories, statistics, traces."""
