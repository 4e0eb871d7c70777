"""What devices take: profiles, measuring them, predicting graphs, and placing nodes by predicted cost."""
