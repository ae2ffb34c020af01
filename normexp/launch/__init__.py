"""From many cells to processes on one machine. Heavy imports happen inside the jobs."""
