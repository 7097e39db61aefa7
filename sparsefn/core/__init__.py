"""States, algorithms, trees, random numbers, schedules and triggers."""
