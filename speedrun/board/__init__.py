"""The leaderboard, pictures of records, submissions, and the logs of others."""
