"""The leaderboard, its plots, and submissions."""
